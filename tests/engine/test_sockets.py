"""Sockets as we make them: private, bounded in size, never guessing a port."""

import socket as net
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import zmq

from engine.bound import bind_tcp
from engine.errors import ConfigError
from engine.sockets import (
    LINK_PATIENCE_S,
    MAX_MESSAGE_BYTES,
    make_ipc_directory,
    make_socket,
)
from tests.helpers.api_peer import socket_folder

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as made:
        yield made


@pytest.mark.row("S-04")
def test_the_folder_of_ipc_sockets_is_private_and_random() -> None:
    """Nobody but the owner can look into it, and nobody can guess its name."""
    with socket_folder() as base:
        first, second = make_ipc_directory(str(base)), make_ipc_directory(str(base))

        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        assert first != second


def test_a_folder_too_deep_for_socket_files_is_refused(tmp_path: Path) -> None:
    """A Unix socket's path is short; the error says which setting to change."""
    with pytest.raises(ConfigError, match="RAYWIRE_RPC_BASE_PATH to a shorter one"):
        make_ipc_directory(str(tmp_path / ("x" * 90)))


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    """The operating system's reason is in the message."""
    with socket_folder() as base, pytest.raises(ConfigError, match="No such file"):
        make_ipc_directory(str(base / "missing"))


def test_a_link_may_be_down_for_a_minute(context: Context) -> None:
    """TCP alone decides that a connection is dead, after three minutes; ZeroMQ's heartbeats are
    off."""
    with make_socket(context, zmq.DEALER) as made:
        assert made.getsockopt(zmq.HEARTBEAT_IVL) == 0
        assert made.getsockopt(zmq.TCP_KEEPALIVE) == 1
        idle_s, interval_s, count = (
            int(made.getsockopt(option))
            for option in (
                zmq.TCP_KEEPALIVE_IDLE,
                zmq.TCP_KEEPALIVE_INTVL,
                zmq.TCP_KEEPALIVE_CNT,
            )
        )
        assert idle_s + interval_s * count == LINK_PATIENCE_S == 180
        assert made.getsockopt(zmq.TCP_MAXRT) == 180_000


def test_oversize_frames_are_refused_before_they_are_read(context: Context) -> None:
    """ZeroMQ drops the peer at the length prefix: our limit is set on every socket."""
    for kind in (zmq.ROUTER, zmq.DEALER, zmq.PUSH, zmq.PULL):
        with make_socket(context, kind) as made:
            assert made.getsockopt(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES
            assert made.getsockopt(zmq.LINGER) == 0


@pytest.mark.row("F-23")
def test_a_length_prefix_of_two_gigabytes_costs_the_stranger_its_connection(
    context: Context,
) -> None:
    """The ROUTER goes on serving others."""
    with make_socket(context, zmq.ROUTER) as router, net.socket() as stranger:
        bound = bind_tcp("127.0.0.1")
        bound.serve(router)
        address = bound.address
        stranger.connect(("127.0.0.1", int(address.rpartition(":")[2])))
        stranger.settimeout(10.0)
        stranger.sendall(GREETING + READY_COMMAND)
        greeting = b""
        while b"READY" not in greeting:
            greeting += stranger.recv(1000)
        stranger.sendall(b"\x00\x05small")
        assert router.poll(10_000)
        assert router.recv_multipart()[1] == b"small"  # it speaks the protocol so far
        stranger.sendall(b"\x02" + (1 << 31).to_bytes(8, "big"))
        while stranger.recv(1000):  # until it closes
            pass

        with make_socket(context, zmq.DEALER, identity=b"friend") as dealer:
            dealer.connect(address)
            dealer.send(b"hello")
            assert router.poll(10_000)
            assert router.recv_multipart() == [b"friend", b"hello"]


# ZMTP 3.0: signature, version, NULL mechanism, as client; then READY as a DEALER.
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY_COMMAND = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


def test_a_router_says_who_cannot_be_reached(context: Context) -> None:
    """An unroutable send raises: the rank is down."""
    with make_socket(context, zmq.ROUTER) as router, socket_folder() as folder:
        router.bind(f"ipc://{folder}/router")
        with pytest.raises(zmq.ZMQError, match="Host unreachable"):
            router.send_multipart([b"nobody", b"hello"])


def test_an_identity_is_never_taken_over(context: Context) -> None:
    """A second socket of the same identity is turned away while the first is connected."""
    with (
        socket_folder() as folder,
        make_socket(context, zmq.ROUTER) as router,
        make_socket(context, zmq.DEALER, identity=b"rank 0") as first,
        make_socket(context, zmq.DEALER, identity=b"rank 0") as second,
    ):
        address = f"ipc://{folder}/router"
        router.bind(address)
        first.connect(address)
        first.send(b"first")
        assert router.poll(10_000)
        assert router.recv_multipart() == [b"rank 0", b"first"]
        second.connect(address)
        second.send(b"second")

        assert not router.poll(300)
        router.send_multipart([b"rank 0", b"answer"])
        assert first.poll(10_000)
