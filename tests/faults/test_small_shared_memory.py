"""A machine whose shared memory is small, or full."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.server import wait_for
from tests.integration.hosts import Host, hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PORT = 8000
WITHOUT_MEMFD = "import os\ndel os.memfd_create\n"
"""As in Pythons that were built for old systems: rings are files of /dev/shm then."""


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with hosts(1) as (one,):
        yield one


@contextlib.contextmanager
def shared_memory(host: Host, size: str, *, is_full: bool) -> Iterator[None]:
    """A /dev/shm of that size, as a container has it."""
    host.run("mount", "-o", f"remount,size={size}", "/dev/shm")
    if is_full:
        host.run("sh", "-c", "cat /dev/zero > /dev/shm/full", check=False)
    try:
        yield
    finally:
        host.run("sh", "-c", "rm -f /dev/shm/full")


def environment(folder: Path, has_memfd: bool) -> dict[str, str]:
    if has_memfd:
        return {}
    (folder / "sitecustomize.py").write_text(WITHOUT_MEMFD)
    return {"PYTHONPATH": str(folder)}


def stop(host: Host) -> None:
    """As a supervisor in the host does."""
    pids = [str(p.pid) for p in host.processes() if p.args.startswith("RAYWIRE::APIServer")]
    host.run("kill", *pids, check=False)


def answer(host: Host, text: str) -> str:
    with host.network():
        body = {"model": "m", "prompt": text, "max_tokens": len(text)}
        url = f"http://{host.address}:{PORT}/v1/completions"
        done = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert done.status_code == 200, done.text
    return str(done.json()["choices"][0]["text"])


@pytest.mark.row("F-43")
@pytest.mark.parametrize(
    ("is_full", "has_memfd"), [(False, True), (True, True), (False, False)], ids=str
)
def test_a_small_shared_memory_is_enough(
    host: Host, tmp_path: Path, is_full: bool, has_memfd: bool
) -> None:
    """64 MB in /dev/shm, as containers have, and full of somebody else's files: rings need no file.
    Where they do, their chunks shrink. A prompt that is larger than a chunk is served as well."""
    env = environment(tmp_path, has_memfd)
    log = tmp_path / "log"
    serve = ("python", "-m", "cluster", "serve", "scripted", "--served-model-name", "m")
    with shared_memory(host, "64m", is_full=is_full):
        server = host.popen(*serve, "--port", str(PORT), env=env, log=log)
        try:
            wait_for(
                lambda: "ready total=" in log.read_text() or server.poll() is not None, "ready", 240
            )
            assert server.poll() is None, log.read_text()
            assert answer(host, "hello") == "hello"
            assert host.shm_segments() == (["full"] if is_full else [])
        finally:
            stop(host)
            server.wait(30)
    assert ("chunks" in log.read_text()) != has_memfd


@pytest.mark.row("F-43")
def test_a_full_shared_memory_is_told_before_the_model_loads(host: Host, tmp_path: Path) -> None:
    """Where rings have to be files: what they need and what there is, in one line, exit code 2; no
    worker has been started, and nobody has died of SIGBUS."""
    env = environment(tmp_path, has_memfd=False)
    serve = ("python", "-m", "cluster", "serve", "scripted", "--port", str(PORT))
    with shared_memory(host, "64m", is_full=True):
        done = host.run(*serve, env=env, check=False, timeout_s=240)
    assert done.returncode == 2, done.stdout
    last = done.stdout.splitlines()[-1]
    assert "/dev/shm" in last
    assert "MiB" in last
    assert "Traceback" not in done.stdout
    assert "workers started" not in done.stdout
