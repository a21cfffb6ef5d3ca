"""Encrypted wires: who has the right keys and is listed gets in, and nobody else."""

import contextlib
import logging
import socket as net
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import zmq

from engine.bound import bind_tcp
from engine.curve import CurveKeys, CurveLink, make_client, make_server
from engine.doorkeeper import Doorkeeper
from engine.sockets import connect_socket, make_socket

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
TIMEOUT_MS = 10_000
REFUSED_MS = 300
"""How long we wait for what must not come, after the refusal has been counted."""


class House:
    """An encrypted PULL on loopback and its doorkeeper."""

    def __init__(self, context: Context) -> None:
        self.keys = CurveKeys.generate()
        self.doorkeeper = Doorkeeper()
        self.pull = make_socket(context, zmq.PULL)
        self.doorkeeper.guard(context, [self.pull], self.keys)
        bound = bind_tcp("127.0.0.1")
        bound.serve(self.pull)
        self.address = bound.address

    def heard(self, timeout_ms: int = TIMEOUT_MS) -> bytes | None:
        return self.pull.recv() if self.pull.poll(timeout_ms) else None


@pytest.fixture
def house() -> Iterator[House]:
    context: Context = zmq.Context()
    made = House(context)
    yield made
    made.pull.close()
    context.term()  # ends the doorkeeper, and waits for it


@contextlib.contextmanager
def visitor(house: House, link: CurveLink | None) -> Iterator["zmq.Socket[bytes]"]:
    """A PUSH that has said something, or will once it is let in."""
    with zmq.Context() as context:
        with connect_socket(context, zmq.PUSH, house.address, curve=link) as push:
            push.send(b"secret")
            yield push


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_listed_client_with_the_right_keys_gets_in(house: House) -> None:
    """Also one that is listed while the sockets are served already."""
    friend = CurveKeys.generate()
    house.doorkeeper.allow([friend.public])
    with visitor(house, CurveLink(friend, house.keys.public)):
        assert house.heard() == b"secret"
    assert house.doorkeeper.num_refused == 0


def test_a_client_may_be_listed_after_it_has_knocked(house: House) -> None:
    """It tries again by itself, and what it had to say has waited."""
    friend = CurveKeys.generate()
    with zmq.Context() as context, make_socket(context, zmq.PUSH) as push:
        make_client(push, CurveLink(friend, house.keys.public))
        push.setsockopt(zmq.HANDSHAKE_IVL, 200)  # as in life, but sooner
        push.connect(house.address)
        push.send(b"secret")
        until(lambda: house.doorkeeper.num_refused)
        push.send(b"another", zmq.NOBLOCK)
        house.doorkeeper.allow([friend.public])
        assert [house.heard(), house.heard()] == [b"secret", b"another"]


def stranger_without_a_key(house: House) -> CurveLink | None:
    return None


def stranger_who_is_not_listed(house: House) -> CurveLink | None:
    return CurveLink(CurveKeys.generate(), house.keys.public)


def friend_who_takes_us_for_another(house: House) -> CurveLink | None:
    friend = CurveKeys.generate()
    house.doorkeeper.allow([friend.public])
    return CurveLink(friend, CurveKeys.generate().public)


def thief_of_a_public_key(house: House) -> CurveLink | None:
    """Knows whom we admit, but not that one's secret."""
    friend = CurveKeys.generate()
    house.doorkeeper.allow([friend.public])
    return CurveLink(CurveKeys(friend.public, CurveKeys.generate().secret), house.keys.public)


@pytest.mark.row("S-17")
@pytest.mark.parametrize(
    "link_of",
    [
        stranger_without_a_key,
        stranger_who_is_not_listed,
        friend_who_takes_us_for_another,
        thief_of_a_public_key,
    ],
)
def test_nobody_else_does(house: House, link_of: Callable[[House], CurveLink | None]) -> None:
    """Nothing gets through, the refusal is counted, and friends still get in."""
    with visitor(house, link_of(house)):
        until(lambda: house.doorkeeper.num_refused)
        assert house.heard(REFUSED_MS) is None
    friend = CurveKeys.generate()
    house.doorkeeper.allow([friend.public])
    with visitor(house, CurveLink(friend, house.keys.public)):
        assert house.heard() == b"secret"


# ZMTP 3.0: signature, version, NULL mechanism, as client.
GREETING_WITHOUT_KEYS = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0" + b"NULL".ljust(52, b"\0")


def test_who_keeps_knocking_does_not_fill_the_log(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Refusals are logged at 1, 2, 4, 8, …: ten strangers, four lines."""
    with caplog.at_level(logging.WARNING):
        for number in range(1, 11):
            with net.create_connection(("127.0.0.1", int(house.address.rpartition(":")[2]))) as s:
                s.sendall(GREETING_WITHOUT_KEYS)
                until(lambda: house.doorkeeper.num_refused == number)  # noqa: B023  # called here
    assert [r.args[0] for r in caplog.records if r.args] == [1, 2, 4, 8]  # type: ignore[index]


def test_without_a_doorkeeper_nobody_gets_in() -> None:
    """Encrypted, but nobody asked whom to admit: closed, where ZeroMQ's default is open."""
    keys, bound = CurveKeys.generate(), bind_tcp("127.0.0.1")
    with zmq.Context() as context:
        link = CurveLink(CurveKeys.generate(), keys.public)
        with (
            make_socket(context, zmq.PULL) as pull,
            connect_socket(context, zmq.PUSH, bound.address, curve=link) as push,
        ):
            make_server(pull, keys)
            bound.serve(pull)
            push.send(b"secret")
            assert not pull.poll(REFUSED_MS)


def test_a_secret_key_is_not_shown() -> None:
    """Settings are logged; secrets are not."""
    keys = CurveKeys.generate()
    assert keys.secret.decode() not in repr(CurveLink(keys, keys.public))
