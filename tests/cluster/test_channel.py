"""What the command and its API server processes say to each other."""

import contextlib
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest
import zmq

from cluster.channel import (
    Allow,
    AnyMessage,
    Begin,
    Channel,
    Death,
    Loaded,
    Ping,
    Pong,
    Refusal,
    Serve,
    Wires,
)
from engine.config import CoordinatorAddresses
from engine.sockets import connect_socket, make_socket
from engine.wire import EngineReady, Fingerprint
from tests.helpers.wires import ipc_wires, tcp_wires

READY = EngineReady(
    engine_index=1,
    epoch=0,
    max_model_len=64,
    num_gpu_blocks=8,
    block_size=16,
    kv_cache_size_tokens=128,
    dtype="float32",
    vocab_size=300,
    max_num_seqs=4,
    fingerprint=Fingerprint(protocol=1, code="c", packages={}, model="m", tokenizer="t"),
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = (Channel(each) for each in Pipe(duplex=True))
    with contextlib.closing(ours), contextlib.closing(theirs):
        yield ours, theirs


@pytest.mark.parametrize(
    "message",
    [
        Begin("/models/m", CoordinatorAddresses(request="a", output="b", publish="c"), 7.5),
        Begin("/models/m", None, 7.5),
        Begin("/models/m", None, 7.5, READY.fingerprint),
        Allow([b"key"]),
        Death(1, "killed"),
        Death(None, "an API server"),
        Loaded([READY]),
        Serve(),
        Refusal("no such model"),
        Ping(),
        Pong(["step 3, EXECUTE for 0.1 s", ""]),
    ],
)
def test_messages_arrive_as_they_were_said(
    ends: tuple[Channel, Channel], message: AnyMessage
) -> None:
    """In their own types, without pickle."""
    ends[0].send(message)
    assert ends[1].receive() == message


def test_ipc_wires_travel_as_names(ends: tuple[Channel, Channel], tmp_path: Path) -> None:
    """There is nothing else to hand over."""
    wires = ipc_wires(tmp_path)
    ends[0].send_wires(wires)
    message = ends[1].receive()
    assert isinstance(message, Wires)
    received = ends[1].receive_wires(message)
    assert received.request.address == wires.request.address
    assert received.keys is None


def test_a_bound_port_travels_without_ever_being_free(ends: tuple[Channel, Channel]) -> None:
    """The receiver serves the very socket that the sender has bound and closed by now."""
    wires = tcp_wires()
    ends[0].send_wires(wires)
    message = ends[1].receive()
    assert isinstance(message, Wires)
    received = ends[1].receive_wires(message)
    wires.close()
    assert received.keys == wires.keys

    with zmq.Context() as context:
        pull = make_socket(context, zmq.PULL)
        received.output.serve(pull)
        push = connect_socket(context, zmq.PUSH, wires.output.address)
        with pull, push:
            push.send(b"hello")
            assert pull.poll(10_000)
            assert pull.recv() == b"hello"
    received.request.close()


def test_nobody_there_is_no_error_for_who_speaks(ends: tuple[Channel, Channel]) -> None:
    """Its death is told elsewhere; who listens hears of the end."""
    ends[1].close()
    ends[0].send(Death(0, "killed"))
    ends[0].send_wires(ipc_wires(Path("/none")))
    with pytest.raises(EOFError):
        ends[0].receive()
