"""A machine that runs out of memory, or whose disk is full."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import running_server, wait_for
from tests.helpers.streams import BackgroundStream, completion_body

LIMIT_MIB = 2048

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def memory_cgroup(limit_mib: int) -> Iterator[Path]:
    """A control group with a limit; skips where this machine lets us make none."""
    name, limit = f"raywire-test-{os.getpid()}", str(limit_mib << 20)
    folder, file = Path("/sys/fs/cgroup", name), "memory.max"
    if Path("/sys/fs/cgroup/memory").exists():  # version 1
        folder, file = Path("/sys/fs/cgroup/memory", name), "memory.limit_in_bytes"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (folder / file).write_text(limit)
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield folder
    finally:
        folder.rmdir()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """1 MiB; skips where this machine lets us mount nothing."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.row("F-11")
def test_a_core_that_the_kernel_kills_is_told_apart(tmp_path: Path) -> None:
    """In a control group with a limit the OOM killer ends the one that takes most. It looks like
    any SIGKILL, and the one line says what it was, and the limit."""
    model = make_slow_model(tmp_path)
    flags = ("-tp", "2", "--served-model-name", "m")
    with memory_cgroup(LIMIT_MIB) as group:
        env = {"MEMORY_CGROUP": str(group)}
        greedy = "tests.helpers.greedy_core"
        with running_server(str(model), *flags, env=env, module=greedy) as server:
            stream = BackgroundStream(server, max_tokens=4000)
            stream.join(60)
            assert server.wait() == 1
            assert [error["code"] for error in stream.errors] == ["engine_dead"]
            [line] = re.findall(r"^ERROR .*$", server.log, re.MULTILINE)
            assert "first cause: engine core EngineCore_DP0" in line
            assert "killed by SIGKILL" in line
            assert re.search(r"out of memory, probably: \d+ OOM kills? since the start", line)
            assert f"may use {LIMIT_MIB} MiB" in line
            server.assert_gone()


@pytest.mark.row("F-47", "S-27")
@pytest.mark.parametrize("more", [(), ("--api-server-count", "2")], ids=" ".join)
def test_a_full_disk_does_not_keep_it_from_serving(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Cache, temporary folder and log on a disk of 1 MiB, which something else fills: answers come
    as before, the log has no traceback, and a stop is one in order."""
    model = make_slow_model(tmp_path)
    with small_disk(tmp_path / "disk") as disk:
        (disk / "tmp").mkdir()
        env = {"RAYWIRE_CACHE_DIR": str(disk / "cache"), "TMPDIR": str(disk / "tmp")}
        env["PYTHONUNBUFFERED"] = ""  # a buffer would try again at the end
        flags = ("--served-model-name", "m", "--linear-backend", "torch", *more)
        with running_server(
            str(model), *flags, env=env, may_leave_files=True, log_folder=disk
        ) as server:
            port = server.port
            with server.http() as client:
                assert client.post("/v1/completions", json=completion_body()).status_code == 200
                fill(disk)
                for _ in range(50):  # lines for the last block of its log, which is its own
                    assert client.get("/v1/models").status_code == 200
                for _ in range(20):
                    answer = client.post("/v1/completions", json=completion_body())
                    assert answer.status_code == 200
                assert client.get("/health").status_code == 200
                assert client.get("/metrics").status_code == 200
            assert server.port == port
            assert "Traceback" not in server.log
            stream = BackgroundStream(server, max_tokens=20)
            stream.join()
            assert stream.finish_reasons == ["length"]
            wait_for(lambda: full(disk), "the disk is still full", 1)


def fill(disk: Path) -> None:
    """Until nothing fits any more."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for num_bytes in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * num_bytes)


def full(disk: Path) -> bool:
    return os.statvfs(disk).f_bavail == 0
