"""Bound ends of wires: a port is held from choice to use, by whoever has it then."""

import contextlib
import multiprocessing
import socket as net
from collections.abc import Iterator
from typing import TypeAlias

import pytest
import zmq

from engine.bound import BoundSocket, bind_tcp
from engine.errors import ConfigError
from engine.sockets import connect_socket, make_socket
from tests.helpers.core_process import empty_main_module
from tests.helpers.wires import free_port, has_ipv6

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as made:
        yield made


@pytest.mark.row("S-56")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_of_the_kernels_choice_on_one_address(context: Context, host: str) -> None:
    """Bind, then publish: peers may connect and write before anybody serves the port."""
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 on this machine: bind_tcp on ::1 stays unproved")
    bound = bind_tcp(host)
    with connect_socket(context, zmq.PUSH, bound.address) as push:
        push.send(b"hello")
        with make_socket(context, zmq.PULL) as pull:
            bound.serve(pull)

            assert host in bound.address
            assert not bound.address.endswith(":0")
            assert pull.poll(10_000)
            assert pull.recv() == b"hello"


def test_a_port_is_free_again_once_its_socket_is_closed(context: Context) -> None:
    """Served or not: libzmq closes what it has adopted."""
    bound = bind_tcp("127.0.0.1")
    port = int(bound.address.rpartition(":")[2])
    with make_socket(context, zmq.PULL) as pull:
        bound.serve(pull)
        with pytest.raises(ConfigError, match="widen --wire-port-range"):
            bind_tcp("127.0.0.1", (port, port))
    context.term()
    bind_tcp("127.0.0.1", (port, port)).close()


def test_ports_of_a_range_are_taken_one_after_the_other() -> None:
    """Until none is left; then the error says what to do."""
    first = free_port()
    with contextlib.ExitStack() as stack, contextlib.suppress(ConfigError):
        for _ in range(3):  # others may have some of them
            bound = bind_tcp("127.0.0.1", (first, first + 2))
            stack.callback(bound.close)
            assert first <= int(bound.address.rpartition(":")[2]) <= first + 2
        with pytest.raises(ConfigError, match=f"no port from {first} to {first + 2} is free"):
            bind_tcp("127.0.0.1", (first, first + 2))


@pytest.mark.row("S-04")
@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.1", r"cannot bind a wire to 192\.0\.2\.1: .*must be an address of this node"),
        ("0.0.0.0", "one address of this node, not to all"),
        ("::", "one address of this node, not to all"),
        ("not an address", "cannot bind a wire to not an address"),
    ],
)
@pytest.mark.row("F-21")
def test_an_address_that_is_not_ours_is_refused(host: str, message: str) -> None:
    """The error says which would do; the wildcard never does."""
    with pytest.raises(ConfigError, match=message):
        bind_tcp(host)


@pytest.mark.row("S-56")
def test_a_bound_port_is_handed_to_a_child_process(context: Context) -> None:
    """The parent binds and lets go; the child serves; whoever connects meets the child."""
    bound = bind_tcp("127.0.0.1")
    child = multiprocessing.get_context("spawn").Process(target=_serve_one_message, args=(bound,))
    with empty_main_module():
        child.start()
    bound.close()
    try:
        with connect_socket(context, zmq.REQ, bound.address) as req:
            req.send(b"hello")
            assert req.poll(20_000)
            assert req.recv() == b"hello from the child"
            child.join(20)
            assert child.exitcode == 0
            with net.socket() as late:
                assert late.connect_ex(("127.0.0.1", int(bound.address.rpartition(":")[2]))) != 0
    finally:
        child.kill()
        child.join()


def _serve_one_message(bound: BoundSocket) -> None:
    with zmq.Context() as context, make_socket(context, zmq.REP, linger_ms=1000) as rep:
        bound.serve(rep)
        assert rep.poll(20_000)
        rep.send(rep.recv() + b" from the child")
