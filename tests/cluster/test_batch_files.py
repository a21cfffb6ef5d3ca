"""Input and output of a batch: nothing is lost, nothing comes twice, whatever a crash has left."""

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.batch import request_file, result_file
from cluster.batch.lines import BadLine, Done, answered, encode, failed
from engine.errors import ConfigError


def request_line(custom_id: object = "a", **fields: object) -> bytes:
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": "x"},
            **fields,
        },
        ensure_ascii=False,
    ).encode()


def run(source: Path, output: Path, max_results: int | None = None) -> None:
    """What `run-batch` does with the two files, and a server that always says yes."""
    with result_file.opened(str(output)) as results, request_file.opened(str(source)) as file:
        request_file.check(file, results.done)
        for number, line in enumerate(request_file.pending(file, results.done)):
            if number == max_results:
                return
            result = (
                failed(line)
                if isinstance(line, BadLine)
                else answered(line, 200, "r", json.dumps({"said": line.custom_id}).encode())
            )
            results.write(encode(result))


def keys(output: Path) -> list[tuple[str | None, int | None]]:
    """What each line of an output is the result of."""
    results = [json.loads(line) for line in output.read_bytes().splitlines()]
    return [(each["custom_id"], each["error"] and each["error"]["line"]) for each in results]


IDS = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5, unique=True)


def check_crash(source: Path, output: Path, whole: bytes, cut: int) -> None:
    """After a crash that left the first `cut` bytes, the next run adds what is missing, leaves what
    is whole, and nothing is there twice."""
    output.write_bytes(whole)
    expected = sorted(map(str, keys(output)))
    output.write_bytes(whole[:cut])

    run(source, output)

    assert sorted(map(str, keys(output))) == expected
    assert output.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, cut) + 1])


def test_a_crash_at_any_byte_costs_nothing(tmp_path: Path) -> None:
    """Of the second of two lines, from the end of the first to its own end."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(request_line("a") + b"\n" + request_line("é"))
    run(source, output)
    whole = output.read_bytes()
    for cut in range(whole.find(b"\n"), len(whole) + 1):
        check_crash(source, output, whole, cut)


@settings(max_examples=50)
@given(ids=IDS, has_bad_line=st.booleans(), data=st.data())
def test_a_crash_in_any_batch_costs_nothing(
    ids: list[str], has_bad_line: bool, data: st.DataObject
) -> None:
    """Whatever the ids, and whether the lines have one."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "in"), Path(folder, "out")
        source.write_bytes(
            b"\n".join([b"no JSON"] * has_bad_line + [request_line(each) for each in ids])
        )
        run(source, output)
        whole = output.read_bytes()
        check_crash(source, output, whole, data.draw(st.integers(0, len(whole))))


@settings(max_examples=50)
@given(ids=IDS, stops=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), max_size=4))
def test_any_number_of_crashes_costs_nothing(ids: list[str], stops: list[tuple[int, int]]) -> None:
    """Runs that end after some results, with the last of them torn, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "in"), Path(folder, "out")
        source.write_bytes(b"\n".join(request_line(each) for each in ids))
        for num_results, torn_bytes in stops:
            run(source, output, num_results)
            size = output.stat().st_size
            os.truncate(output, max(size - torn_bytes, 0))

        run(source, output)

        assert sorted(key for key, _ in keys(output)) == sorted(ids)  # type: ignore[type-var]


def test_a_whole_line_that_lacks_its_end_is_kept(tmp_path: Path) -> None:
    """It is complete, since no beginning of a JSON object is one."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(request_line("a") + b"\n" + request_line("b"))
    run(source, output, max_results=1)
    first = output.read_bytes()
    output.write_bytes(first[:-1])

    run(source, output)

    assert output.read_bytes().startswith(first)
    assert keys(output) == [("a", None), ("b", None)]


@pytest.mark.parametrize(
    "content", [b"my diary\n", b"my diary", b'{"id": "x"}\n', request_line() + b"\n", b"\x00" * 9]
)
def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, content: bytes) -> None:
    """Whoever has mixed up two names gets an error, and the file is what it was."""
    output = tmp_path / "out"
    output.write_bytes(content)

    with pytest.raises(ConfigError, match="name another file"), result_file.opened(str(output)):
        pass

    assert output.read_bytes() == content


def test_two_runs_do_not_share_an_output(tmp_path: Path) -> None:
    """Both would send what neither has found there. A dead one holds nothing."""
    output = str(tmp_path / "out")
    with result_file.opened(output), pytest.raises(ConfigError, match="another run-batch"):
        with result_file.opened(output):
            pass
    with result_file.opened(output):
        pass


def test_a_custom_id_may_come_once() -> None:
    """The error names it, and both lines."""
    content = b"\n".join([request_line("a"), b"", request_line("b"), request_line("a")])

    with pytest.raises(ConfigError, match="'a' on lines 1 and 4"):
        request_file.check(io.BytesIO(content), Done())


def test_a_bad_line_takes_its_custom_id_as_well() -> None:
    """Its error would have the same name as the other's result."""
    content = request_line("a") + b"\n" + request_line("a", method="GET")

    with pytest.raises(ConfigError, match="lines 1 and 2"):
        request_file.check(io.BytesIO(content), Done())


def test_many_that_come_twice_are_counted() -> None:
    """Five are enough to see what has happened."""
    content = b"\n".join([request_line(str(number)) for number in range(9)] * 2)

    with pytest.raises(ConfigError, match=r"'4' on lines 5 and 14, and 4 more$"):
        request_file.check(io.BytesIO(content), Done())


def test_an_input_without_requests_is_a_mistake() -> None:
    """More likely than a batch of nothing."""
    with pytest.raises(ConfigError, match="no request"):
        request_file.check(io.BytesIO(b"\n \r\n"), Done())


def test_lines_are_numbered_as_editors_do() -> None:
    """From 1, and the empty ones count; a byte order mark is none of the first line's."""
    content = b"\xef\xbb\xbf" + request_line("a") + b"\r\n\r\n" + request_line("b")

    assert [
        (line.custom_id, line.line) for line in request_file.read_lines(io.BytesIO(content))
    ] == [("a", 1), ("b", 3)]


def test_what_is_done_is_counted() -> None:
    """By outcome, so that an earlier failure is not forgotten."""
    content = b"\n".join([request_line("a"), request_line("b"), b"no JSON", request_line("c")])
    done = Done(by_id={"a": True, "b": False, "elsewhere": False}, bad_lines={3, 9})

    counts = request_file.check(io.BytesIO(content), done)

    assert (counts.total, counts.succeeded, counts.failed, counts.pending) == (4, 1, 2, 1)
    assert [line.custom_id for line in request_file.pending(io.BytesIO(content), done)] == ["c"]


def test_an_input_may_be_a_pipe() -> None:
    """Though it is read twice."""
    script = (
        "from cluster.batch import request_file\n"
        "with request_file.opened('-') as f:\n"
        "    print([[x.custom_id for x in request_file.read_lines(f)] for _ in range(2)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=request_line("a"), capture_output=True, check=True
    )

    assert done.stdout.strip() == b"[['a'], ['a']]"


def test_an_output_may_be_a_pipe(tmp_path: Path) -> None:
    """Of which nothing is read."""
    reader, writer = os.pipe()
    try:
        with result_file.opened(f"/dev/fd/{writer}") as results:
            results.write(b"x\n")
            results.sync()
        assert os.read(reader, 10) == b"x\n"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("path", ["nowhere/file", "."])
def test_files_that_are_not_there_are_mistakes(path: str, tmp_path: Path) -> None:
    """One line, with the name as it was given."""
    full = str(tmp_path / path)

    with pytest.raises(ConfigError, match="cannot read"), request_file.opened(full):
        pass
    with pytest.raises(ConfigError, match="cannot write"), result_file.opened(full):
        pass
