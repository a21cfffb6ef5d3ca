"""What processes let others connect to."""

from collections.abc import Iterable, Iterator

import psutil

from tests.helpers.server import Process


def listening(processes: Iterable[Process]) -> Iterator[tuple[str, str, int]]:
    """Title, address and port of every socket on which one of them can be connected to, by TCP or
    by a name that is no file: such names are everybody's."""
    for process in processes:
        for each in psutil.Process(process.pid).net_connections("inet"):
            if each.status == psutil.CONN_LISTEN or (each.type == 2 and not each.raddr):
                yield process.title, str(each.laddr.ip), int(each.laddr.port)
        for each in psutil.Process(process.pid).net_connections("unix"):
            if str(each.laddr).startswith(("@", "\0")):
                yield process.title, str(each.laddr), 0
