"""Real servers for tests: `python -m cluster serve …` as a user starts it, and cleaned up whatever
happens.

Each server gets a session and a temporary folder of its own. Afterwards nothing may be left of it:
no process of the session, no file in the folder, no segment in /dev/shm.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import psutil

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0

_LISTENING = re.compile(r"listening on \S+ port (\d+)")


def wait_for(
    condition: Callable[[], T], what: str, timeout_s: float = 10.0, interval_s: float = 0.02
) -> T:
    """Return the first true value of `condition`; AssertionError with `what` if there is none in
    time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(interval_s)
    return value


@dataclass(frozen=True, slots=True)
class Process:
    """A line of `ps`."""

    pid: int
    title: str
    cpu_s: float
    """User and system time so far."""


class Server:
    """A running `raywire serve`."""

    def __init__(self, process: "subprocess.Popen[bytes]", log_path: Path, folder: Path) -> None:
        self.process = process
        self.log_path = log_path
        self.folder = folder
        """Its TMPDIR and RAYWIRE_RPC_BASE_PATH."""

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def port(self) -> int:
        """The real one, from the log: the server was started with port 0."""
        return int(self.wait_for_log(_LISTENING)[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def http(self, timeout_s: float = 60.0) -> httpx.Client:
        """A client of this server; close it."""
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def wait_for_log(
        self, pattern: "str | re.Pattern[str]", timeout_s: float = START_TIMEOUT_S
    ) -> "re.Match[str]":
        """Wait until the log has `pattern`, as long as the server lives."""

        def find() -> "re.Match[str] | None":
            found = re.search(pattern, self.log)
            if found is None and self.process.poll() is not None:
                raise AssertionError(
                    f"exited with {self.process.returncode} before {pattern!r}:\n{self.log}"
                )
            return found

        match = wait_for(find, f"{pattern!r} in the log:\n{self.log}", timeout_s)
        assert match is not None
        return match

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until /ready says 200."""

        def is_ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"exited with {self.process.returncode}:\n{self.log}")
            with contextlib.suppress(httpx.TransportError):
                return client.get("/ready").status_code == 200
            return False

        with self.http(timeout_s=5.0) as client:
            wait_for(is_ready, f"/ready:\n{self.log}", timeout_s, interval_s=0.05)

    def processes(self) -> list[Process]:
        """All living processes of the server's session; zombies are not."""
        return session_processes(self.process.pid)

    def raywire_processes(self) -> dict[str, Process]:
        """Those with a title of ours, by title."""
        return {p.title: p for p in self.processes() if p.title.startswith("RAYWIRE::")}

    def listeners(self) -> list[tuple[str, int]]:
        """Address and port of every internet socket on which one of its processes listens."""
        return [
            (str(connection.laddr.ip), int(connection.laddr.port))
            for process in self.processes()
            for connection in psutil.Process(process.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]

    def cpu_share(self, seconds: float) -> float:
        """How much of a core all its processes use together, measured over so many seconds."""
        pids = [process.pid for process in self.processes()]
        began_s, before_s = time.monotonic(), sum(map(cpu_seconds, pids))
        time.sleep(seconds)  # there is no condition to wait for: nothing shall happen
        return (sum(map(cpu_seconds, pids)) - before_s) / (time.monotonic() - began_s)

    def signal(self, signum: signal.Signals) -> None:
        """As `kill` does: to the command's process only."""
        self.process.send_signal(signum)

    def interrupt(self) -> None:
        """As a terminal does on Ctrl-C: to every process of the foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {timeout_s:g} s: {self.processes()}\n{self.log}"
            ) from None

    def assert_gone(self, timeout_s: float = 5.0) -> None:
        """Nothing is left: processes, socket files, temporary files, segments."""
        wait_for(lambda: not self.processes(), f"no process left: {self.processes()}", timeout_s)
        assert self.leftovers() == []

    def leftovers(self) -> list[str]:
        """Files in the server's temporary folder, and segments that bear our name."""
        files = [str(path) for path in self.folder.rglob("*")]
        return files + [str(path) for path in Path("/dev/shm").glob("*raywire*")]


def session_processes(session: int) -> list[Process]:
    """Living processes of one session, also those whose parent is gone."""
    listing = subprocess.run(
        ["ps", "-ww", "-eo", "sid=,pid=,stat=,cputimes=,args="],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = []
    for line in listing.splitlines():
        sid, pid, state, _, title = line.split(None, 4)
        if int(sid) == session and not state.startswith("Z"):
            found.append(Process(int(pid), title, cpu_seconds(int(pid))))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, in hundredths; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running_server(
    model: str,
    *flags: str,
    env: Mapping[str, str] | None = None,
    is_ready_awaited: bool = True,
    may_leave_files: bool = False,
    module: str = "cluster",
    log_folder: Path | None = None,
) -> Iterator[Server]:
    """Start `raywire serve model flags` on a port of the kernel's choice; end it with the block.

    Args:
        model: what to serve.
        flags: more flags.
        env: more environment variables.
        is_ready_awaited: False hands out the server while it loads.
        may_leave_files: a killed server cannot tidy its folder if it was still starting.
        module: what `python -m` runs; one that watches the command from inside, perhaps.
        log_folder: where its log goes; None: a temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="rw-") as folder, tempfile.TemporaryDirectory() as logs:
        log_path = (log_folder or Path(logs)) / "log"
        command = [module, "serve", model, "--port", "0", *flags]
        server = _spawn(command, Path(folder), log_path, env or {})
        try:
            if is_ready_awaited:
                server.wait_ready()
            yield server
            _stop(server)
            wait_for(lambda: not server.processes(), f"none left: {server.processes()}", 5.0)
            assert may_leave_files or server.leftovers() == []
        finally:
            _kill_all(server)


def _spawn(command: list[str], folder: Path, log_path: Path, env: Mapping[str, str]) -> Server:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "RAYWIRE_RPC_BASE_PATH": str(folder),
        **env,
    }
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(process, log_path, folder)


def _stop(server: Server) -> None:
    if server.process.poll() is None:
        server.signal(signal.SIGTERM)
        code = server.wait()
        assert code == 0, f"exit code {code} after SIGTERM:\n{server.log}"


def _kill_all(server: Server) -> None:
    """The last resort, also for what has lost its parent. By pid, and only of this session."""
    for process in server.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    server.process.wait(10)
