"""The API server's side of wire 1, against engine cores that speak it from threads."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop
import zmq

from api.engine_client import EngineClient
from engine.bound import ServerWires
from engine.codec import Encoder, unpack_tokens
from engine.errors import EngineDeadError, InvalidRequestError, UnavailableError, WireError
from engine.wire import EngineCoreOutputs, FinishReason, OutputType
from tests.helpers.connected_client import TIMEOUT_S, connected, make_request, run_once, until
from tests.helpers.fake_engine import FakeEngine, endless_answer
from tests.helpers.outputs import read
from tests.helpers.wires import ipc_wires, tcp_wires


@pytest.fixture
def wires(tmp_path: Path) -> ServerWires:
    return ipc_wires(tmp_path)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[Any]], Any]:
    """Runs a coroutine on each kind of event loop: descriptors signal changes on both."""

    def run_on_loop(work: Any) -> Any:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(work, TIMEOUT_S))

    return run_on_loop


def test_request_goes_out_and_its_tokens_come_back(
    wires: ServerWires, run: Callable[[Any], Any]
) -> None:
    """Over real sockets, on asyncio's loop and on uvloop."""

    async def work() -> list[int]:
        async with connected(wires) as client:
            outputs = await read(client.stream(make_request()))
            return [t for output in outputs for t in unpack_tokens(output.new_token_ids)]

    with FakeEngine(wires) as engine:
        assert run(work()) == [0, 1, 2, 256]
        assert engine.received[0].client_index == 0


def test_thousand_requests_lose_no_output(wires: ServerWires, run: Callable[[Any], Any]) -> None:
    """The sockets' descriptors signal changes only: everything is read each time."""

    async def count(client: EngineClient, i: int) -> int:
        outputs = await read(client.stream(make_request(f"r{i}")))
        return sum(len(unpack_tokens(output.new_token_ids)) for output in outputs)

    async def work() -> list[int]:
        async with connected(wires) as client:
            counts = await asyncio.gather(*(count(client, i) for i in range(1000)))
            assert client.num_in_flight == 0
            return counts

    with FakeEngine(wires):
        assert run(work()) == [4] * 1000


def test_large_prompt_travels_beside_the_body(wires: ServerWires) -> None:
    """100,000 tokens arrive as they were."""

    async def work() -> None:
        async with connected(wires) as client:
            big = np.arange(100_000, dtype="<u4")
            request = msgspec.structs.replace(make_request(), prompt_token_ids=big)
            client.stream(request)
            await until(lambda: engine.received)

    with FakeEngine(wires, endless_answer) as engine:
        run_once(work())
        prompt = engine.received[0].prompt_token_ids
        assert prompt is not None
        assert np.array_equal(prompt, np.arange(100_000))


def test_closing_a_stream_early_aborts_the_request(
    wires: ServerWires, run: Callable[[Any], Any]
) -> None:
    """At once on the engine; late outputs are dropped, and nothing is in flight any more."""

    async def work() -> None:
        async with connected(wires) as client:
            stream = client.stream(make_request())
            await until(stream.take)
            stream.close()
            assert client.num_in_flight == 0
            await until(lambda: not engine.running)

    with FakeEngine(wires, endless_answer) as engine:
        run(work())
        assert engine.aborted == ["r"]


def test_finished_request_is_not_aborted(wires: ServerWires) -> None:
    """Closing after the end sends nothing."""

    async def work() -> None:
        async with connected(wires) as client:
            stream = client.stream(make_request())
            await read(stream)
            stream.close()
            await client.utility("statistics")  # behind whatever might have been sent

    with FakeEngine(wires) as engine:
        run_once(work())
        assert engine.aborted == []


def test_mark_dead_from_another_thread_wakes_readers(
    wires: ServerWires, run: Callable[[Any], Any]
) -> None:
    """Whoever watches the processes does so in a thread."""

    async def work() -> None:
        async with connected(wires) as client:
            stream = client.stream(make_request())
            await asyncio.to_thread(client.mark_dead, 0, "killed by SIGKILL")
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await read(stream)

    with FakeEngine(wires, endless_answer):
        run(work())


@pytest.mark.parametrize("epoch", [0, 2])
def test_stale_epoch_is_counted_and_dropped(wires: ServerWires, epoch: int) -> None:
    """Outputs of another incarnation than the one that said READY reach nobody."""

    async def work() -> None:
        async with connected(wires) as client:
            with contextlib.closing(Pusher(wires)) as pusher:
                pusher.send(OutputType.OUTPUTS, EngineCoreOutputs(0, epoch))
                await until(lambda: client.num_stale_messages == 1)
            assert client.death is None

    with FakeEngine(wires, epoch=1):
        run_once(work())


class Pusher:
    """A peer on the output wire that says what it likes."""

    def __init__(self, wires: ServerWires) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(wires.output.address)

    def send(self, kind: OutputType, message: object) -> None:
        self._socket.send_multipart([kind.value, *Encoder().encode(message)])

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._context.term()


BAD_MESSAGES: list[tuple[bytes, ...]] = [
    (b"",),
    (b"\x09", b"\x90"),
    (b"\x00",),
    (b"\x00", b"\xc1"),
    (b"\x00", b"\x90"),
    (b"\x00", b"\x93\x05\x00\x90"),  # rank 5 of 1
    (b"\x00", b"\x93\x00\x00\x90", b"an array that nobody mentions"),
    (b"\x01", b"\x91\x00"),
    (b"\x02", b"\x94\xa1x\x07\x00\xa1c"),
    (b"\x00", b"\x91" * 5000),
]


def test_bad_messages_are_counted_and_dropped(wires: ServerWires) -> None:
    """Whatever arrives on the output wire, the client goes on."""

    async def work() -> None:
        async with connected(wires) as client:
            with contextlib.closing(Pusher(wires)) as pusher:
                for frames in BAD_MESSAGES:
                    pusher.send_raw(*frames)
                await until(lambda: client.num_bad_messages == len(BAD_MESSAGES))
            stream = client.stream(make_request())
            assert (await read(stream))[-1].finish_reason is FinishReason.STOP

    with FakeEngine(wires):
        run_once(work())


def test_utility_calls_answer_per_engine(wires: ServerWires) -> None:
    """On all engine cores, or on one."""

    async def work() -> tuple[list[Any], list[Any]]:
        async with connected(wires, num_engines=2) as client:
            everywhere = await client.utility("reset_prefix_cache")
            return everywhere, await client.utility("statistics", engine_index=1)

    with FakeEngine(wires), FakeEngine(wires, index=1) as second:
        everywhere, one = run_once(work())
        assert everywhere == [True, True]
        assert one[0].scheduler.num_running == 0
        assert [call.method for call in second.calls] == ["reset_prefix_cache", "statistics"]


def test_unknown_utility_method_is_not_sent(wires: ServerWires) -> None:
    """The allow-list holds on this side too."""

    async def work() -> None:
        async with connected(wires) as client:
            await client.utility("__init__")

    with FakeEngine(wires) as engine:
        with pytest.raises(WireError, match="no utility method"):
            run_once(work())
        assert engine.calls == []


def test_utility_call_without_an_answer_times_out(wires: ServerWires) -> None:
    """And leaves no pending call behind."""

    async def work() -> None:
        async with connected(wires) as client:
            engine.answers_calls = False
            with pytest.raises(UnavailableError, match="no answer"):
                await client.utility("statistics", timeout_s=0.1)
            assert client.num_pending_calls == 0

    with FakeEngine(wires) as engine:
        run_once(work())


def test_requests_are_spread_over_ranks(wires: ServerWires) -> None:
    """Or go where they ask to; a rank that does not exist is the caller's mistake."""

    async def work() -> None:
        async with connected(wires, num_engines=2) as client:
            first.is_paused = second.is_paused = True
            for i in range(4):
                client.stream(make_request(f"r{i}"))
            client.stream(make_request("to-1", data_parallel_rank=1))
            with pytest.raises(InvalidRequestError, match="from 0 to 1"):
                client.stream(make_request("to-2", data_parallel_rank=2))
            await until(lambda: len(first.running) + len(second.running) == 5)

    with FakeEngine(wires) as first, FakeEngine(wires, index=1) as second:
        run_once(work())
        assert len(first.received) == 2
        assert [r.request_id for r in second.received][-1] == "to-1"


def test_a_client_that_is_closed_takes_no_wires_any_more() -> None:
    """Its start was cut short in another thread: the ports are given back."""
    client, wires = EngineClient(), tcp_wires()
    client.close()
    client.bind(wires)
    assert wires.request.descriptor == wires.output.descriptor == -1


def test_closing_the_client_fails_what_is_pending(wires: ServerWires) -> None:
    """Nobody is left waiting; closing twice is harmless."""

    async def work() -> None:
        async with connected(wires) as client:
            stream = client.stream(make_request())
            client.close()
            client.close()
            client.mark_dead(0, "ended by whoever closed the client")
            with pytest.raises(UnavailableError):
                await read(stream)
            assert client.death is None

    with FakeEngine(wires, endless_answer):
        run_once(work())


def test_requests_in_flight_are_counted_by_rank_until_they_end(wires: ServerWires) -> None:
    """However they end: with their last output, aborted, never sent, or failed all together."""

    def in_flight(client: EngineClient) -> list[int]:
        return [load.num_own for load in client.balancer.loads]

    async def work() -> None:
        async with connected(wires, num_engines=2) as client:
            streams = [
                client.stream(make_request(f"r{i}", data_parallel_rank=i % 2)) for i in range(4)
            ]
            assert in_flight(client) == [2, 2]
            engines[0].is_paused = False
            await until(lambda: in_flight(client) == [0, 2])
            streams[1].close()
            assert in_flight(client) == [0, 1]
            with pytest.raises(InvalidRequestError):
                client.stream(make_request("bad", data_parallel_rank=2))
            copy = client.stream(make_request("copy"), follows=streams[3].route)
            assert (copy.route.rank, in_flight(client)) == (1, [0, 2])
            client.mark_dead(1, "test")
            assert in_flight(client) == [0, 0]

    with FakeEngine(wires, index=0) as first, FakeEngine(wires, index=1) as second:
        engines = (first, second)
        first.is_paused = second.is_paused = True
        run_once(work())


def test_reset_prefix_cache_is_known_to_the_balancer(wires: ServerWires) -> None:
    """Only of the rank that has done it: one with work to do refuses."""
    long = np.arange(64, dtype="<u4")

    async def work() -> None:
        async with connected(wires, num_engines=2) as client:
            for rank in (0, 1):
                request = make_request(f"r{rank}", data_parallel_rank=rank)
                client.stream(msgspec.structs.replace(request, prompt_token_ids=long))
            engines[0].is_paused = False
            await until(lambda: client.num_in_flight == 1 and engines[1].running)

            assert await client.utility("reset_prefix_cache") == [True, False]

            for rank, num_blocks in ((0, 0), (1, 3)):
                route = client.balancer.choose(long, salt=(None, None), pinned_rank=rank)
                assert route.matched_blocks == num_blocks

    with FakeEngine(wires, index=0) as first, FakeEngine(wires, index=1) as second:
        engines = (first, second)
        first.is_paused = second.is_paused = True
        run_once(work())
