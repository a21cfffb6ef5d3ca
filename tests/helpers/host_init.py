"""PID 1 of a host of `tests/integration/hosts.py`.

    python -S -E host_init.py NAME FOLDER SHM_BYTES ETC_HOSTS

Runs in new mount, PID and UTS namespaces. It gives the host its name, its own temporary folder,
/dev/shm and names of other hosts, and says so with one line. Then it reaps orphans, as PID 1 must:
without that a dead raylet stays a zombie, and Ray believes that it lives. It ends, and the kernel
then kills every process of the host, when its standard input does: with whoever started it.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def main(name: str, folder: str, shm_bytes: str, etc_hosts: str) -> None:
    socket.sethostname(name)
    _mount("-t", "tmpfs", "-o", f"size={shm_bytes},mode=1777", "tmpfs", "/dev/shm")
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder)
    _mount("-t", "tmpfs", "tmpfs", "/run")
    _replace("/etc/hosts", etc_hosts)
    _replace("/etc/resolv.conf", "")  # no name server is reached here: say so at once
    signal.signal(signal.SIGCHLD, _reap)
    os.write(1, b"up\n")
    os.read(0, 1)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _replace(path: str, text: str) -> None:
    if Path(path).exists():
        other = Path("/run") / Path(path).name
        other.write_text(text)
        _mount("--bind", str(other), path)


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
