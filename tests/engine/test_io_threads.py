"""Input and output thread on real sockets, with nothing behind them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
import zmq

from engine.grammar.compiler import Compiler
from engine.inbox import Abort, Add, Call, Fenced, Inbox, Wave
from engine.input_thread import InputThread
from engine.output_thread import OutputThread, Progress
from engine.thinning import ThinnedCount
from engine.utility import make_call
from engine.wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineReady,
    Fence,
    Fingerprint,
    FinishReason,
    Heartbeat,
    Phase,
    RequestType,
    StartWave,
)
from tests.helpers.api_peer import ApiPeer, socket_folder
from tests.helpers.server import wait_for

READY = EngineReady(0, 1, 4096, 64, 16, 1024, "f", 1000, 256, Fingerprint(1, "c", {}, "m", "t"))


@contextmanager
def context_and_peer() -> Iterator[tuple["zmq.Context[zmq.Socket[bytes]]", ApiPeer]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket_folder() as folder, ApiPeer(folder) as peer:
        yield context, peer
        context.term()  # hangs unless every socket of the threads has been closed


def make_output_thread(
    context: "zmq.Context[zmq.Socket[bytes]]", peer: ApiPeer, **changes: Any
) -> OutputThread:
    settings: dict[str, Any] = {
        "engine_index": 2,
        "epoch": 3,
        "heartbeat_interval_s": 60.0,
        "progress": lambda: Progress(Phase.IDLE, 0.0, 7),
        "on_crash": lambda error: None,
    }
    thread = OutputThread(context, [peer.output_address], **(settings | changes))
    thread.start()
    return thread


def test_outputs_arrive_whole_and_in_order_whatever_their_size() -> None:
    """The one buffer that all bodies are encoded into leaks nothing from one to the next."""
    sizes = [1, 70_000, 3, 20_000, 0, 300_000, 5]
    with context_and_peer() as (context, peer):
        thread = make_output_thread(context, peer)
        for size in sizes:
            output = EngineCoreOutput("r", bytes([size % 256]) * 4 * size)
            thread.put(0, EngineCoreOutputs(2, 3, [output]))
        assert thread.finish("enough", linger_ms=1000)
        peer.wait_for(EngineDead)

    received = [
        o.new_token_ids for m in peer.log if isinstance(m, EngineCoreOutputs) for o in m.outputs
    ]
    assert received == [bytes([size % 256]) * 4 * size for size in sizes]
    assert peer.log[-1] == EngineDead("ENGINE_CORE_DEAD", 2, 3, "enough")


def test_heartbeats_keep_their_rhythm_between_outputs() -> None:
    """A busy engine core beats as well, and says how old its step is."""
    began = time.monotonic() - 5.0
    with context_and_peer() as (context, peer):
        thread = make_output_thread(
            context,
            peer,
            heartbeat_interval_s=0.05,
            progress=lambda: Progress(Phase.EXECUTE, began, 7),
        )
        beats: list[Heartbeat] = []
        while len(beats) < 4:
            thread.put(0, EngineCoreOutputs(2, 3))
            message = peer.receive()
            if isinstance(message, Heartbeat):
                beats.append(message)
        assert thread.finish("enough", linger_ms=1000)

    assert {(beat.engine_index, beat.epoch, beat.step) for beat in beats} == {(2, 3, 7)}
    assert 5000 <= beats[0].age_ms <= beats[1].age_ms <= beats[2].age_ms < 30_000


@pytest.mark.row("F-10")
def test_a_crashed_output_thread_still_has_last_words() -> None:
    """Outputs for an API server that does not exist crash it; DEAD is sent all the same."""
    errors: SimpleQueue[BaseException] = SimpleQueue()
    with context_and_peer() as (context, peer):
        thread = make_output_thread(context, peer, on_crash=errors.put)
        thread.put(99, EngineCoreOutputs(2, 3))
        assert isinstance(errors.get(timeout=10.0), IndexError)
        assert thread.finish("crashed", linger_ms=1000)

        assert peer.wait_for(EngineDead).cause == "crashed"


class Input:
    """A running input thread, with all that comes out of it."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *peers: ApiPeer,
        coordinator_index: int | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.aborts: SimpleQueue[list[str]] = SimpleQueue()
        self.replies: SimpleQueue[tuple[int, EngineCoreOutputs]] = SimpleQueue()
        self.crashes: SimpleQueue[BaseException] = SimpleQueue()
        self.prepare: Callable[[EngineCoreRequest], Any] = lambda request: request
        self.dropped = ThinnedCount()
        self.thread = InputThread(
            context,
            [peer.request_address for peer in peers],
            coordinator_index=coordinator_index,
            ready=READY,
            prepare=lambda request: self.prepare(request),
            dropped=self.dropped,
            inbox=self.inbox,
            aborts=self.aborts,
            reply=lambda client_index, outputs: self.replies.put((client_index, outputs)),
            on_crash=self.crashes.put,
            compiler=compiler or Compiler(Path("/nowhere"), 1000),
        )
        self.thread.start()
        for peer in peers:
            peer.wait_ready()


def test_a_thread_that_cannot_say_ready_leaves_no_socket_open(tmp_path: Path) -> None:
    """One that is left would keep the context, and with it the engine core, from ending."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    crashes: SimpleQueue[BaseException] = SimpleQueue()
    InputThread(
        context,
        [f"ipc://{tmp_path}/r"],
        ready=msgspec.structs.replace(READY, dtype=object()),  # which nobody can encode
        prepare=lambda request: None,  # type: ignore[arg-type, return-value]
        dropped=ThinnedCount(),
        inbox=SimpleQueue(),
        aborts=SimpleQueue(),
        reply=lambda client_index, outputs: None,
        on_crash=crashes.put,
        compiler=Compiler(Path("/nowhere"), 1000),
    ).start()
    assert isinstance(crashes.get(timeout=10.0), TypeError)

    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(10.0)
    assert not ending.is_alive()


def test_each_message_becomes_an_item_in_the_order_it_came() -> None:
    """The five types that travel; an abort is on the second queue as well."""
    with context_and_peer() as (context, peer):
        threads = Input(context, peer)
        peer.add("a")
        peer.abort("a", "b")
        peer.send_message(RequestType.UTILITY, make_call(0, 1, "statistics", ()))
        peer.send_message(RequestType.START_DP_WAVE, StartWave(4))
        peer.send_message(RequestType.FENCE, Fence(4))
        items = [threads.inbox.get(timeout=10.0) for _ in range(5)]

    assert [type(item) for item in items] == [Add, Abort, Call, Wave, Fenced]
    assert items[1] == Abort(["a", "b"])
    assert threads.aborts.get_nowait() == ["a", "b"]
    assert threads.crashes.empty()


def test_waves_are_the_coordinators_word_and_its_only_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wave that an API server wants to start, and anything else that comes from the coordinator,
    is counted and dropped; without a coordinator, waves may come from any API server (above)."""
    with context_and_peer() as (context, api), socket_folder() as folder:
        with ApiPeer(folder, 1) as coordinator:
            threads = Input(context, api, coordinator, coordinator_index=1)
            coordinator.add("a")
            coordinator.abort("a")
            coordinator.send_message(RequestType.UTILITY, make_call(1, 1, "statistics", ()))
            coordinator.send_message(RequestType.START_DP_WAVE, StartWave(4))
            assert threads.inbox.get(timeout=10.0) == Wave(StartWave(4))
            api.send_message(RequestType.START_DP_WAVE, StartWave(5))
            api.abort("b")
            assert threads.inbox.get(timeout=10.0) == Abort(["b"])

    assert threads.dropped.count == 4
    assert threads.aborts.get_nowait() == ["b"]
    assert "START_DP_WAVE came from client 0" in caplog.text


def test_a_request_whose_preparation_crashes_fails_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bug that one request triggers ends that request: ERROR for it, and the next one passes."""

    def prepare(request: EngineCoreRequest) -> Any:
        if request.request_id == "poison":
            raise ZeroDivisionError("boo")
        return request

    with context_and_peer() as (context, peer):
        threads = Input(context, peer)
        threads.prepare = prepare
        peer.add("poison")
        peer.add("fine")
        item = threads.inbox.get(timeout=10.0)
        client_index, outputs = threads.replies.get(timeout=10.0)

    assert isinstance(item, Add)
    assert item.request.request_id == "fine"
    assert client_index == 0
    assert [(o.request_id, o.finish_reason) for o in outputs.outputs] == [
        ("poison", FinishReason.ERROR)
    ]
    assert "boo" not in str(outputs.outputs[0].details)  # in the log, with its traceback
    assert "ZeroDivisionError: boo" in caplog.text


def test_a_prompt_of_a_hundred_thousand_tokens_is_not_copied() -> None:
    """The request's tokens are a read-only view of the frame that ZeroMQ received."""
    with context_and_peer() as (context, peer):
        threads = Input(context, peer)
        peer.add("long", prompt=100_000)
        item = threads.inbox.get(timeout=10.0)

    assert isinstance(item, Add)
    message: Any = item.request  # as prepared here: the message itself
    tokens = message.prompt_token_ids
    assert tokens.shape == (100_000,)
    assert not tokens.flags.owndata
    assert not tokens.flags.writeable
    assert tokens[:3].tolist() == [1, 2, 3]


def test_the_input_thread_ends_with_its_context() -> None:
    """Terminating the context wakes it, it closes its sockets, and nothing has crashed."""
    with context_and_peer() as (context, peer):
        threads = Input(context, peer)

    # Its last socket is closed, which the context waits for, a moment before it ends.
    wait_for(
        lambda: "input" not in [thread.name for thread in threading.enumerate()],
        "the end of the input thread",
    )
    assert threads.crashes.empty()
