"""Children that talk to the command as API servers do, and do nothing else. For
tests/cluster/test_api_servers.py; apart from it, so that they load in no time."""

import contextlib
import time
from multiprocessing.connection import Connection

from cluster.channel import Begin, Channel, Loaded, Ping, Pong


def answer(index: int, joins: bool, connection: "Connection[bytes, bytes]") -> None:
    """An API server that loads at once and answers the command."""
    channel = Channel(connection)
    with contextlib.suppress(EOFError):
        while True:
            match channel.receive():
                case Begin():
                    channel.send(Loaded([]))
                case Ping():
                    channel.send(Pong([]))


def hang_as_newcomer(index: int, joins: bool, connection: "Connection[bytes, bytes]") -> None:
    """One that never loads if it takes the place of another."""
    if joins:
        time.sleep(600)
    answer(index, joins, connection)


def talk_nonsense(index: int, joins: bool, connection: "Connection[bytes, bytes]") -> None:
    """One that is asked and says what nobody can read; the first is sane, and so is a newcomer."""
    if index == 1 and not joins:
        Channel(connection).send(Loaded([]))
        while not isinstance(Channel(connection).receive(), Ping):
            pass
        connection.send_bytes(b"\xc1")
        time.sleep(600)
    answer(index, joins, connection)
