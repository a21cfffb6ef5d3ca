"""`raywire run-batch` as users run it: with a server of its own, with one that runs, killed in the
middle and taken up again.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.scripted_models import make_scripted_model, make_slow_model
from tests.helpers.server import (
    ROOT,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Process,
    running_server,
    session_processes,
    wait_for,
)

SOME_FAILED = 3


@dataclass
class Batch:
    """A running `raywire run-batch`, with a session and a temporary folder of its own."""

    process: "subprocess.Popen[bytes]"
    output: Path
    log_path: Path
    folder: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def processes(self) -> list[Process]:
        return session_processes(self.process.pid)

    @property
    def num_results(self) -> int:
        """Whole lines of the output."""
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for `condition`, as long as the command runs."""

        def holds() -> bool:
            assert self.process.poll() is None, self.log
            return condition()

        wait_for(holds, what, START_TIMEOUT_S)

    def wait_for_results(self, count: int) -> None:
        self.wait_for(lambda: self.num_results >= count, f"{count} results")

    def wait(self) -> int:
        """Wait for the exit code, after which nothing may be left."""
        code = self.process.wait(START_TIMEOUT_S)
        self.assert_gone()
        return code

    def assert_gone(self) -> None:
        wait_for(lambda: not self.processes, f"no process left: {self.processes}", STOP_TIMEOUT_S)
        assert [str(path) for path in self.folder.rglob("*")] == []


@contextlib.contextmanager
def run_batch(source: Path, output: Path, *flags: str) -> Iterator[Batch]:
    """Start a batch; whatever happens, nothing of it is left behind the block."""
    with tempfile.TemporaryDirectory(prefix="rw-") as folder, tempfile.TemporaryDirectory() as logs:
        log_path = Path(logs) / "log"
        variables = {"OMP_NUM_THREADS": "1", "TMPDIR": folder, "RAYWIRE_RPC_BASE_PATH": folder}
        command = ["cluster", "run-batch", "-i", str(source), "-o", str(output), *flags]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        batch = Batch(process, output, log_path, Path(folder))
        try:
            yield batch
        finally:
            for each in batch.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
            process.wait(STOP_TIMEOUT_S)


def request_lines(ids: Sequence[str], **body: object) -> str:
    """Completions of the model `m`; the prompt is the id."""
    lines = [
        {
            "custom_id": each,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": each, "temperature": 0, **body},
        }
        for each in ids
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_a_short_and_a_long_one(path: Path) -> None:
    """So that there is a result while there is something to do."""
    path.write_text(
        request_lines(["short"], max_tokens=2) + request_lines(["long"], max_tokens=4000)
    )


def results(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def texts(output: Path) -> dict[str, str]:
    """By custom_id; each is there once."""
    found = results(output)
    by_id = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}
    assert len(by_id) == len(found)
    return by_id


@pytest.fixture(scope="module")
def echo_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Says what it was told."""
    return str(make_scripted_model(tmp_path_factory.mktemp("models"), kind="echo"))


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Speaks for ever, at 20 tokens a second."""
    return str(make_slow_model(tmp_path_factory.mktemp("models"), step_delay_s=0.05))


def test_a_batch_with_a_server_of_its_own(echo_model: str, tmp_path: Path) -> None:
    """Chats and completions are answered, what is wrong is an error of its own line, and the exit
    code tells; run again there is nothing to do. Nobody else can reach the server."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text(request_lines(["hello"]))
    chat = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}
    with source.open("a") as file:
        for custom_id, body in (("chat", chat), ("bad", {**chat, "temperature": -1})):
            line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**line, "body": body}) + "\n")
        file.write("no JSON\n")
    flags = ("--model", echo_model, "--served-model-name", "m")

    with run_batch(source, output, *flags) as batch:
        assert batch.wait() == SOME_FAILED
        assert "4 requests: 2 succeeded; 2 failed; " in batch.log
        assert "first cause" not in batch.log
    found = {each["custom_id"]: each for each in results(output)}
    assert found["hello"]["response"]["body"]["choices"][0]["text"] == "hello"
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "hi"
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert found[None]["error"]["line"] == 4
    content = output.read_bytes()

    with run_batch(source, output, *flags) as batch:
        assert batch.wait() == SOME_FAILED
        assert "4 were there before" in batch.log
    assert output.read_bytes() == content


@pytest.mark.slow
def test_results_go_into_a_pipe(echo_model: str) -> None:
    """From standard input to standard output, and nothing else is there."""
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": "x", "temperature": 0},
    }
    flags = ["-i", "-", "-o", "-", "--model", echo_model, "--served-model-name", "m"]
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "run-batch", *flags, "--log-level", "INFO"],
        input=json.dumps(line),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        cwd=ROOT,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["response"]["body"]["choices"][0]["text"] == "x"


@pytest.mark.slow
@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_batch_that_is_killed_is_taken_up_again(
    slow_model: str, tmp_path: Path, num_engines: int
) -> None:
    """SIGKILL in the middle, with the last line torn: the server ends by itself, and the next run
    asks for the rest only. What was complete is the same to the byte."""
    source, output = tmp_path / "in", tmp_path / "out"
    ids = [f"r{number}" for number in range(60)]
    source.write_text(request_lines(ids, max_tokens=10))
    flags = ["--model", slow_model, "--served-model-name", "m", "--max-concurrency", "4"]
    flags += ["-dp", str(num_engines)]

    with run_batch(source, output, *flags) as batch:
        batch.wait_for_results(10)
        assert len([p for p in batch.processes if "EngineCore" in p.title]) == num_engines
        batch.process.kill()
        batch.process.wait(STOP_TIMEOUT_S)
        batch.assert_gone()
    before = output.read_bytes()
    output.write_bytes(before[:-30])  # as if the kernel had not had the rest
    whole = before[: before.rfind(b"\n", 0, len(before) - 30) + 1]
    assert 9 <= whole.count(b"\n") < len(ids)

    with run_batch(source, output, *flags) as batch:
        assert batch.wait() == 0, batch.log
        assert f"{whole.count(bytes([10]))} were there before" in batch.log
    assert output.read_bytes().startswith(whole)
    assert texts(output) == dict.fromkeys(ids, "abcabcabca")


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_ends_all_at_once(slow_model: str, tmp_path: Path, signum: signal.Signals) -> None:
    """Sent to the whole group, as a terminal does. Requests under way are dropped, results stay."""
    source, output = tmp_path / "in", tmp_path / "out"
    write_a_short_and_a_long_one(source)
    flags = ("--model", slow_model, "--served-model-name", "m")

    with run_batch(source, output, *flags) as batch:
        batch.wait_for_results(1)
        os.killpg(batch.process.pid, signum)

        assert batch.wait() == 128 + signum
        assert "1 have no result yet: run the same command again" in batch.log
        assert not re.search(r"Traceback|first cause|^ERROR", batch.log, re.MULTILINE), batch.log
    assert list(texts(output)) == ["short"]


@pytest.mark.slow
def test_a_signal_while_the_server_loads_ends_all(slow_model: str, tmp_path: Path) -> None:
    """There is nothing to be waited for."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text(request_lines(["a"]))
    flags = ("--model", slow_model, "--served-model-name", "m", "--log-level", "INFO")

    with run_batch(source, output, *flags) as batch:
        batch.wait_for(lambda: "listening on" in batch.log, "a server")
        os.killpg(batch.process.pid, signal.SIGINT)

        assert batch.wait() == 128 + signal.SIGINT
        assert "Traceback" not in batch.log, batch.log


@pytest.mark.slow
def test_an_engine_that_dies_ends_the_batch(slow_model: str, tmp_path: Path) -> None:
    """Exit code 1, the first cause once, and what has a result is kept for the next run."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text(request_lines([f"r{number}" for number in range(40)], max_tokens=10))
    flags = ("--model", slow_model, "--served-model-name", "m", "--max-concurrency", "2")

    with run_batch(source, output, *flags) as batch:
        batch.wait_for_results(4)
        [engine] = [each for each in batch.processes if "EngineCore" in each.title]
        os.kill(engine.pid, signal.SIGKILL)

        assert batch.wait() == 1
        assert batch.log.count("first cause: ") == 1
        assert "error: the server has ended (exit code 1); its log says why" in batch.log
        assert "have no result yet: run the same command again" in batch.log
    assert all(each["response"]["status_code"] == 200 for each in results(output))


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """As with `raywire serve`: exit code 2, and nothing is written."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text(request_lines(["a"]))

    with run_batch(source, output, "--model", str(tmp_path / "nowhere")) as batch:
        assert batch.wait() == 2
        assert "error: " in batch.log
        assert "Traceback" not in batch.log
    assert output.read_bytes() == b""


@pytest.mark.slow
def test_a_batch_for_a_running_server(echo_model: str, tmp_path: Path) -> None:
    """It starts nothing, and leaves the server as it was."""
    source, output = tmp_path / "in", tmp_path / "out"
    ids = [f"r{number}" for number in range(20)]
    source.write_text(request_lines(ids))
    with running_server(echo_model, "--served-model-name", "m") as server:
        with run_batch(source, output, "--url", server.openai_url) as batch:
            assert batch.wait() == 0, batch.log

        assert texts(output) == {each: each for each in ids}
        with server.http() as client:
            assert client.get("/ready").status_code == 200


@pytest.mark.slow
def test_the_server_is_on_the_loopback_device_only(slow_model: str, tmp_path: Path) -> None:
    """Nobody on the network can send requests of his own."""
    source, output = tmp_path / "in", tmp_path / "out"
    write_a_short_and_a_long_one(source)

    with run_batch(source, output, "--model", slow_model, "--served-model-name", "m") as batch:
        batch.wait_for_results(1)
        listeners = [
            connection.laddr.ip
            for process in batch.processes
            for connection in psutil.Process(process.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]

    assert listeners == ["127.0.0.1"]
