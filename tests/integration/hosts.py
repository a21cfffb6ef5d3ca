"""Two or three hosts on one machine, as a cluster sees them.

    with hosts(2) as (one, two):
        one.run("ping", "-c1", two.address)
        two.cut()

                      switch:  br0
                        |             |
                      port1         port2       `cut` takes a port down
                        |             |
        node1:  eth0 10.77.0.1     eth0 10.77.0.2  :node2        also fd00::1, fd00::2

A host is a process, its PID 1 (`tests/helpers/host_init.py`), in namespaces of its own: network,
mounts (with a /dev/shm of limited size and an empty temporary folder), processes, host name, System
V memory. The rest of the file system is the machine's, so all hosts see the checkout, the
interpreter and a test's `tmp_path`. The machine's own interfaces are not touched, and no namespace
has a name: each lives as long as its PID 1, and that no longer than this process, so a test run
that is killed leaves nothing either.
"""

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.helpers.server import ROOT, wait_for

REQUIRE = "REQUIRE_HOSTS"
"""Set to 1 where namespaces are known to work: what would be skipped fails. No variable of raywire,
which warns about those of its prefix that it does not know."""

_INIT = ROOT / "tests" / "helpers" / "host_init.py"
_SLOW_LINK = ROOT / "tests" / "helpers" / "slow_link.py"
_SHM_BYTES = 512 << 20
_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A line of `ps`, as the host itself sees it."""

    pid: int
    args: str


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that listens, and who holds it."""

    address: str
    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of an established TCP connection."""

    local: tuple[str, int]
    peer: tuple[str, int]
    pid: int
    num_bytes: int
    """Sent and received so far."""


class Namespaces:
    """A PID 1 and the namespaces that live with it."""

    def __init__(self, name: str, folder: Path, etc_hosts: str) -> None:
        self.name = name
        new = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc")
        init = (sys.executable, "-S", "-E", str(_INIT), name, str(folder), str(_SHM_BYTES))
        self._unshare = subprocess.Popen(
            ["unshare", *new, "--kill-child", *init, etc_hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._unshare.stdout is not None
        is_up = self._unshare.stdout.readline() == b"up\n"
        children = psutil.Process(self._unshare.pid).children() if is_up else []
        if not children:
            self.end()
            raise AssertionError(f"{name} has not come up; see standard error")
        self.pid = children[0].pid
        """Of its PID 1, outside."""

    def enter(self, *flags: str) -> list[str]:
        """The command that runs another one inside; all namespaces, or those of the flags."""
        return ["nsenter", "-t", str(self.pid), *(flags or ("-m", "-n", "-p", "-u", "-i")), "--"]

    def ip(self, *commands: str) -> None:
        """Run `ip` commands on its network."""
        subprocess.run(
            [*self.enter("-n"), "ip", "-batch", "-"],
            input="\n".join(commands),
            text=True,
            check=True,
        )

    def end(self) -> None:
        """Kill its PID 1; returns when the kernel has killed everything else inside. Idempotent."""
        with self._unshare:  # closes the pipes, and waits
            self._unshare.kill()  # PID 1 dies with it: --kill-child


class Host:
    """One host. Made by `hosts`."""

    def __init__(
        self, namespaces: Namespaces, switch: Namespaces, number: int, tmp: Path, *, is_ipv6: bool
    ) -> None:
        self.name = namespaces.name
        self.address4 = f"10.77.0.{number}"
        self.address6 = f"fd00::{number}"
        self.address = self.address6 if is_ipv6 else self.address4
        self.tmp = tmp
        """Its temporary folder. Other hosts have another one under the same name."""
        self.is_up = True
        """Until it crashes."""

        self._namespaces = namespaces
        self._switch = switch
        self._number = number
        self._port = f"port{number}"
        self._running: list[subprocess.Popen[bytes]] = []

    def plug_in(self) -> None:
        """Connect it to the switch."""
        self._switch.ip(
            f"link add {self._port} type veth peer name eth0 netns {self._namespaces.pid}",
            f"link set {self._port} master br0 up",
        )
        self._namespaces.ip(
            "link set lo up",  # without it Ray's health checks of itself fail
            f"addr add {self.address4}/24 dev eth0",
            f"addr add {self.address6}/64 dev eth0 nodad",
            "link set eth0 up",
            "route add default via 10.77.0.254",  # nobody: but some find "my address" by a route
        )

    def command(self, *command: str, env: Mapping[str, str] | None = None) -> list[str]:
        """The same command, run in the root of the checkout on this host."""
        own = [f"{name}={value}" for name, value in self._environment(env or {}).items()]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(ROOT)]  # nsenter leaves us in /
        return [*self._namespaces.enter(), "env", "-i", *own, *there, *command]

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end, and return what it said; both streams are in `stdout`."""
        result = subprocess.run(
            self.command(*command, env=env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        assert not check or result.returncode == 0, f"{self.name}: {command}:\n{result.stdout}"
        return result

    def popen(
        self, *command: str, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command; it ends with the host at the latest. Its output goes into `log`."""
        with contextlib.ExitStack() as files:
            output = files.enter_context(log.open("wb")) if log else subprocess.DEVNULL
            process = subprocess.Popen(
                self.command(*command, env=env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._running.append(process)
        return process

    def cut(self) -> None:
        """Pull its network cable."""
        self._switch.ip(f"link set {self._port} down")

    def heal(self) -> None:
        """Plug it in again."""
        self._switch.ip(f"link set {self._port} up")

    @contextlib.contextmanager
    def far_away(self, delay_s: float, loss: float = 0.0, seed: int = 0) -> Iterator[None]:
        """While the block runs, what it sends and what it is sent arrives so many seconds later,
        and the given fraction never. TCP connections go on."""
        # eth0 - port1        uplink1 - slow1 - br0:  frames are carried over the gap
        inner, outer = f"uplink{self._number}", f"slow{self._number}"
        self._switch.ip(
            f"link add {inner} type veth peer name {outer}",
            f"link set {inner} up promisc on",
            f"link set {outer} master br0 up",
            f"link set {self._port} nomaster promisc on",
        )
        settings = [inner, self._port, str(delay_s), str(loss), str(seed)]
        carrier = subprocess.Popen(
            [*self._switch.enter("-n"), sys.executable, "-S", "-E", str(_SLOW_LINK), *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert carrier.stdout is not None
        try:
            assert carrier.stdout.readline() == b"up\n"
            yield
        finally:
            carrier.communicate(timeout=10)  # its standard input ends
            self._switch.ip(f"link set {self._port} master br0", f"link del {inner}")
        assert carrier.returncode == 0

    def crash(self) -> None:
        """Kill everything that runs on it, at once. Idempotent."""
        self.is_up = False
        self._namespaces.end()
        for process in self._running:
            process.wait(10)

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """The sockets that this thread opens in the block are the host's, and those of the threads
        that it starts there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/proc/{self._namespaces.pid}/ns/net", os.O_RDONLY)
        try:
            _enter_network(there)
            yield
        finally:
            _enter_network(home)
            os.close(home)
            os.close(there)

    def processes(self) -> list[HostProcess]:
        """All its living processes but PID 1 and the `ps` that finds them."""
        listing = self.run("ps", "-ww", "-eo", "pid=,stat=,args=").stdout
        lines = [line.split(None, 2) for line in listing.splitlines()]
        return [
            HostProcess(int(pid), args)
            for pid, state, args in lines
            if pid != "1" and not state.startswith("Z") and not args.startswith("ps -ww -eo")
        ]

    def listening(self) -> list[Listener]:
        """The TCP sockets that somebody else than the host itself can connect to."""
        found = []
        for line in self._sockets("state", "listening"):
            address, port = _endpoint(line[2])
            if not address.startswith("127.") and address != "::1":
                found += [Listener(address, port, pid) for pid in _pids(line)]
        return found

    def connections(self) -> list[Connection]:
        """Established TCP connections over the network, at this end."""
        return [
            Connection(_endpoint(line[2]), _endpoint(line[3]), pid, _num_bytes(line[-1]))
            for line in self._sockets("-iO", "state", "established")
            if not line[2].startswith(("127.", "[::1]"))
            for pid in _pids(line)
        ]

    def _sockets(self, *which: str) -> list[list[str]]:
        listing = self.run("ss", "-Htnp", *which).stdout
        return [line.split(None, 4) for line in listing.splitlines()]

    def shm_segments(self) -> list[str]:
        """The files in its /dev/shm."""
        return self.run("ls", "-A", "/dev/shm").stdout.split()

    def temporary_files(self) -> list[str]:
        """What lies in its temporary folder."""
        return self.run("ls", "-A", str(self.tmp)).stdout.split()

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """This process's, without what is meant for a cluster that the machine may have."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        binaries = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        return {**inherited, "PATH": binaries, "TMPDIR": str(self.tmp), **more}


def _enter_network(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _endpoint(text: str) -> tuple[str, int]:
    """`10.77.0.1:80`, `[fd00::1]:80`, `*:80`, `[::ffff:10.77.0.1]:80`."""
    address, _, port = text.rpartition(":")
    return address.strip("[]").removeprefix("::ffff:").partition("%")[0], int(port)


def _pids(line: Sequence[str]) -> set[int]:
    """Who holds the socket of a line of `ss`: `users:(("python",pid=7,fd=3),…)`."""
    return {int(part.partition(",")[0]) for part in line[-1].split("pid=")[1:]}


def _num_bytes(text: str) -> int:
    return sum(map(int, re.findall(r"bytes_(?:acked|received):(\d+)", text)))


@contextlib.contextmanager
def hosts(count: int, *, is_ipv6: bool = False) -> Iterator[list[Host]]:
    """So many hosts, connected with each other and nothing else. They end with the block. With
    `is_ipv6`, their IPv6 address is `address`.

    The test is skipped where the machine does not allow namespaces, and fails there if
    REQUIRE_HOSTS is 1.
    """
    skip_where_refused()
    names = [f"node{number}" for number in range(1, count + 1)]
    etc_hosts = "127.0.0.1 localhost\n" + "".join(
        f"10.77.0.{number} {name}\n" for number, name in enumerate(names, 1)
    )
    # Short: the paths of Ray's sockets below it must stay under 107 bytes.
    with tempfile.TemporaryDirectory(prefix="rw-") as folder, contextlib.ExitStack() as stack:
        switch = Namespaces("switch", Path(folder), etc_hosts)
        stack.callback(switch.end)
        switch.ip("link add br0 type bridge", "link set br0 up")
        found = []
        for number, name in enumerate(names, 1):
            namespaces = Namespaces(name, Path(folder), etc_hosts)
            found.append(Host(namespaces, switch, number, Path(folder), is_ipv6=is_ipv6))
            stack.callback(found[-1].crash)
            found[-1].plug_in()
        yield found


def skip_where_refused() -> None:
    """Skip the test, or fail it, where this user may not make namespaces."""
    probe = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"]
    try:
        result = subprocess.run([*probe, "ip", "link"], capture_output=True, text=True, check=False)
        reason = result.stderr.strip() if result.returncode else ""
    except FileNotFoundError as error:
        reason = str(error)
    if reason:
        reason = f"no hosts on this machine (namespaces need root and iproute2): {reason}"
        pytest.fail(reason) if os.environ.get(REQUIRE) == "1" else pytest.skip(reason)


def wait_for_reach(one: Host, other: Host, is_reachable: bool = True) -> None:
    """Wait until one host can, or cannot, open a connection to the other."""

    def answers() -> bool:
        command = ("bash", "-c", f"exec 3<>/dev/tcp/{other.address}/9")
        said = one.run("timeout", "1", *command, check=False).stdout
        return "refused" in said  # by the other host, which is therefore there

    wait_for(lambda: answers() == is_reachable, f"{one.name} reaches {other.name}", 10)
