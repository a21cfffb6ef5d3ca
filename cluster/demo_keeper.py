"""Keeps a Ray cluster on this machine with one job, a raywire server, until it is told to stop.

    python -m cluster.demo_keeper FOLDER MODEL PORT

`make demo-cluster` (`demo_cluster`) starts it in the background. A signal, the end of the server or
the end of Ray ends everything: the job, then Ray, then the folder. Standard output is what the job
says. FOLDER/env is for a shell that wants to look; FOLDER/ray.log is what Ray said.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from engine.lifecycle import stop_on_signals

HOST = "127.0.0.1"
JOB = "demo"
NUM_RANKS = 2
RAY_PORTS = {
    "--port": 6379,
    "--dashboard-port": 8265,
    "--ray-client-server-port": 10001,
    "--dashboard-agent-listen-port": 52365,  # without it no job is taken
}
"""Ray's flags and their defaults. Another cluster of this machine may have these ports."""

_RAY_TIMEOUT_S = 120.0
_JOB_STOP_TIMEOUT_S = 60
"""Longer than a server takes to drain."""

_RAY_STOP_TIMEOUT_S = 30.0


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("model")
@click.argument("port", type=int)
def main(folder: Path, model: str, port: int) -> None:
    ports = {flag: _free_port(default) for flag, default in RAY_PORTS.items()}
    dashboard = f"http://{HOST}:{ports['--dashboard-port']}"
    with stop_on_signals() as stop, _removed(folder):
        settings = _settings(folder, dashboard)
        gcs_address = f"{HOST}:{ports['--port']}"
        _write_for_shells(folder / "env", {**settings, "RAY_ADDRESS": gcs_address})
        # Ray's processes are killed in the end, and cannot tidy up after themselves.
        inside = {"TMPDIR": str(folder), "RAY_TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
        env = {**os.environ, **settings, **inside}
        env.pop("RAY_ADDRESS", None)  # another cluster's
        click.echo(f"starting Ray; its dashboard is {dashboard}")
        with _ray_head(ports, env, folder / "ray.log") as ray:

            def is_over() -> bool:
                return stop.is_set or ray.poll() is not None

            is_up = _wait(lambda: _takes_jobs(settings), is_over, _RAY_TIMEOUT_S)
            if is_up:
                _run_job(_serve_command(model, port), env, is_over)
            elif not stop.is_set:
                raise click.ClickException("Ray has not come up:\n" + _tail(folder / "ray.log"))


def _serve_command(model: str, port: int) -> list[str]:
    flags = ["-dp", str(NUM_RANKS), "--host", HOST, "--port", str(port), "--log-level", "INFO"]
    return ["python", "-m", "cluster", "serve", model, *flags]


def _free_port(default: int) -> int:
    """The default, if nobody has it. Released again: Ray takes no socket, only a number."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", default))
        except OSError:
            sock.bind(("", 0))
        return int(sock.getsockname()[1])


def _settings(folder: Path, dashboard: str) -> dict[str, str]:
    """The environment of every process of the cluster, and of everybody who asks it."""
    return {
        # Some of Ray's ports are open on every interface: of no use to anybody without the token.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_API_SERVER_ADDRESS": dashboard,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def _write_for_shells(path: Path, settings: Mapping[str, str]) -> None:
    path.touch(mode=0o600)  # it holds the token
    path.write_text("".join(f"export {name}='{value}'\n" for name, value in settings.items()))


@contextlib.contextmanager
def _removed(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _ray_head(
    ports: Mapping[str, int], env: Mapping[str, str], log_path: Path
) -> "Iterator[subprocess.Popen[bytes]]":
    """A Ray cluster of one node; `ray start --block` ends its processes when it is ended."""
    flags = [f"{flag}={port}" for flag, port in ports.items()]
    # Ray only counts: ranks and workers share whatever cores there are.
    flags.append(f"--num-cpus={max(2 * NUM_RANKS, os.cpu_count() or 1)}")
    flags.append("--object-store-memory=80000000")  # nothing of ours goes through it
    flags += [f"--dashboard-host={HOST}", "--disable-usage-stats"]
    with log_path.open("wb") as log:
        ray = subprocess.Popen(
            ["ray", "start", "--head", "--block", *flags],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    with ray:
        try:
            yield ray
        finally:
            ray.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                ray.wait(_RAY_STOP_TIMEOUT_S)
            ray.kill()


def _takes_jobs(settings: Mapping[str, str]) -> bool:
    headers = {"Authorization": f"Bearer {settings['RAY_AUTH_TOKEN']}"}
    url = f"{settings['RAY_API_SERVER_ADDRESS']}/api/jobs/"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through a proxy
    with contextlib.suppress(OSError):
        opener.open(urllib.request.Request(url, headers=headers), timeout=5).close()
        return True
    return False


def _run_job(command: Sequence[str], env: Mapping[str, str], is_over: Callable[[], bool]) -> None:
    """Submit the job and follow its log, until it ends or everything shall."""
    runtime_env = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_JOB_STOP_TIMEOUT_S)}})
    submit = ["ray", "job", "submit", "--submission-id", JOB, "--working-dir", "."]
    submit += ["--runtime-env-json", runtime_env, "--", *command]
    with subprocess.Popen(submit, env=env, stdin=subprocess.DEVNULL) as follower:
        try:
            _wait(lambda: follower.poll() is not None, is_over)
        finally:
            _stop_job(env)
            follower.terminate()


def _stop_job(env: Mapping[str, str]) -> None:
    """Let the server drain, and everything of it end; no matter if it has already."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            ["ray", "job", "stop", JOB],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_JOB_STOP_TIMEOUT_S + 10,
            check=False,
        )


def _wait(
    condition: Callable[[], bool], is_over: Callable[[], bool], timeout_s: float = float("inf")
) -> bool:
    """Wait for the condition; False if everything shall end first, or the time is up."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if is_over() or time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-20:])


if __name__ == "__main__":
    main()
