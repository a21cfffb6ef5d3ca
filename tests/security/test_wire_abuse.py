"""Wire 1 under abuse, on real sockets: a stranger who has got hold of one, a peer that has gone
wrong, and messages that are too large. What breaks the protocol is counted and dropped; everybody
else is served as if nothing were.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from api import engine_wire
from api.engine_client import EngineClient
from engine import codec
from engine.codec import Encoder, unpack_tokens
from engine.errors import InvalidRequestError, WireError
from engine.output_thread import OutputThread, Progress
from engine.sampling_params import SamplingParams
from engine.sockets import make_socket
from engine.step import NewRequest, SchedulerOutput
from engine.utility import make_call
from engine.wire import (
    MAX_REQUEST_BYTES,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineReady,
    Fence,
    Fingerprint,
    FinishReason,
    Heartbeat,
    LoadReport,
    OutputDetails,
    OutputType,
    Phase,
    RequestType,
    SchedulerStats,
    StartWave,
    UtilityOutput,
    pack_identity,
)
from tests.helpers.api_peer import ApiPeer, make_request, socket_folder
from tests.helpers.coordinator_process import Peers, run_coordinator
from tests.helpers.core_process import CoreUnderTest, run_core
from tests.helpers.fake_engine import FakeEngine, endless_answer
from tests.helpers.hostile_frames import mutate
from tests.helpers.server import wait_for
from tests.helpers.wires import ipc_wires
from workers import rpc

MIB = 1 << 20
MAX_GROWTH_BYTES = 160 << 20
"""Of resident memory. A sender that is faster fills ZeroMQ's queues, which are bounded: how far
depends on the machine."""

BATCH = 500
"""Broken messages between two looks whether everything goes on."""

QUICK_AND_LONG = pytest.mark.parametrize(
    "num_messages",
    [
        2000,
        pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(400)]),
    ],
)


def frames_of(kind: bytes, message: object) -> list[bytes]:
    return [kind, *(bytes(frame) for frame in Encoder().encode(message))]


def most_lines(count: int) -> int:
    """How many lines of a log `count` bad messages may take: number 1, 2, 4, 8, …"""
    return math.floor(math.log2(count)) + 1


# ------------------------------------------------------------------------- to the engine core

TO_CORE = [
    frames_of(RequestType.ADD.value, make_request("r", 8, logit_bias={1: 2.0}, max_tokens=3)),
    frames_of(RequestType.ADD.value, make_request("s", 2000, max_tokens=2)),
    frames_of(RequestType.ABORT.value, ["r", "s"]),
    frames_of(RequestType.START_DP_WAVE.value, StartWave(1)),
    frames_of(RequestType.UTILITY.value, make_call(0, 1, "statistics", ())),
    frames_of(RequestType.UTILITY.value, make_call(0, 1, "reset_prefix_cache", ())),
    frames_of(RequestType.EXECUTOR_FAILED.value, "cause"),
]


@QUICK_AND_LONG
@pytest.mark.row("F-23", "S-51")
def test_an_engine_core_survives_broken_messages(
    num_messages: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """From an API server's own socket: each is dropped and counted or refused, the log stays short,
    memory flat, a stream between them whole, and no block is lost."""
    rng = random.Random(f"to the core {num_messages}")
    with run_core() as core:
        numbers = itertools.count()
        warm = hurt_core(core, rng, numbers, BATCH)
        memory = psutil.Process(core.pid).memory_info().rss
        hurt = hurt_core(core, rng, numbers, num_messages - BATCH)

        assert psutil.Process(core.pid).memory_info().rss - memory < MAX_GROWTH_BYTES
        assert hurt > warm > BATCH / 4
        wait_for(lambda: not statistics(core).num_running, "nothing runs any more")
        assert statistics(core).kv_cache_usage == 0.0
        num_dropped = statistics(core).num_dropped_messages
    lines = capfd.readouterr().err.splitlines()
    assert sum("dropped a message" in line for line in lines) <= most_lines(num_dropped)
    assert not [line for line in lines if line.startswith("ERROR") or "Traceback" in line]


def hurt_core(
    core: CoreUnderTest, rng: random.Random, numbers: Iterator[int], num_messages: int
) -> int:
    """Send so many broken messages, with a request of ours between every few hundred. Returns how
    many have been dropped by then."""
    for _ in range(num_messages // BATCH):
        for _ in range(BATCH):
            kind, *body = mutate(rng, rng.choice(TO_CORE)) or [b""]
            core.api.send(kind, *body)
        name = f"ours {next(numbers)}"
        core.api.add(name, max_tokens=5)
        assert core.api.finish(name) == ([100, 101, 102, 103, 104], FinishReason.LENGTH)
        core.api.log.clear()
    return statistics(core).num_dropped_messages


def statistics(core: CoreUnderTest) -> SchedulerStats:
    scheduler: SchedulerStats = core.api.call("statistics").scheduler
    return scheduler


@pytest.mark.row("F-26")
def test_ids_that_come_twice_or_never_leave_nothing() -> None:
    """ADD of a living id and of a finished one, ABORT of unknown, of finished, before ADD, twice
    and all at once; UTILITY of what no core has: afterwards every block is free, and every id has
    ended as often as it has lived."""
    with run_core(step_delay_s=0.002) as core:
        api = core.api
        api.abort("a", "b", "never")
        for name in ("a", "b", "c"):
            api.add(name, prompt=70, max_tokens=3000)
            api.add(name, prompt=200, max_tokens=1)
        # An abort may overtake an ADD that still waits, which then is a new life of its id.
        before = statistics(core)
        assert before.num_running + before.num_waiting == 3
        api.abort("a", "a", "never", "a")
        api.abort("a")
        for method in ("core", "_scheduler", "__init__", "step", "close", ""):
            call = msgspec.structs.replace(make_call(0, 9, "statistics", ()), method=method)
            api.send_message(RequestType.UTILITY, call)
            failure = api.wait_for_answer().failure
            assert failure is not None
            assert "no utility method" in failure
        api.abort("b", "c", "b")
        ends = [o for o in ends_of(core, "a", "b", "c") if o.finish_reason is not None]

        assert sorted(o.request_id for o in ends) == ["a", "b", "c"]
        assert {o.finish_reason for o in ends} == {FinishReason.ABORT}
        api.add("a", max_tokens=2)  # free again
        assert api.finish("a") == ([100, 101], FinishReason.LENGTH)
        after = statistics(core)
        assert (after.num_running, after.num_waiting, after.kv_cache_usage) == (0, 0, 0.0)
        assert after.num_dropped_messages == 0


def ends_of(core: CoreUnderTest, *names: str) -> list[EngineCoreOutput]:
    """All that has come of these requests, once the core has nothing to do."""

    def is_idle() -> bool:
        load = statistics(core)
        return not load.num_running + load.num_waiting

    wait_for(is_idle, "nothing runs any more")
    statistics(core)  # its answer comes behind all outputs
    return [
        output
        for message in core.api.log
        if isinstance(message, EngineCoreOutputs)
        for output in message.outputs
        if output.request_id in names
    ]


# --------------------------------------------------------------------------- to an API server

EPOCH = 2**32 - 1
"""Of the engine core that serves: the last there can be, so no broken message is a successor's. The
hostile one says the same where that is nobody's death; what it says of its own, under an older
epoch, is stale."""

READY = EngineReady(0, 1, 4096, 64, 16, 1024, "f", 1000, 256, Fingerprint(1, "c", {}, "m", "t"))
TO_API_SERVER = [
    frames_of(
        OutputType.OUTPUTS.value,
        EngineCoreOutputs(
            0,
            EPOCH,
            [EngineCoreOutput("x", b"\1\0\0\0", details=OutputDetails(error="e"))] * 2,
            SchedulerStats(1, 2, 0.5, num_by_client=[3, 4]),
            utility=UtilityOutput(1),
            finished_ids=["x"],
        ),
    ),
    frames_of(OutputType.HEARTBEAT.value, Heartbeat(0, 1, 2, 3, Phase.IDLE)),
    frames_of(OutputType.DEAD.value, EngineDead("ENGINE_CORE_DEAD", 0, 1, "c")),
    frames_of(b"\x04", LoadReport([])),
]


@contextlib.contextmanager
def hostile_engine(folder: Path) -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    """A DEALER and a PUSH of a process that may open the socket files."""
    wires = ipc_wires(folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = make_socket(context, zmq.DEALER, identity=pack_identity(0, 1))
    push = make_socket(context, zmq.PUSH)
    try:
        dealer.connect(wires.request.address)
        push.connect(wires.output.address)
        yield dealer, push
    finally:
        context.destroy(linger=0)


@QUICK_AND_LONG
@pytest.mark.row("F-23", "S-51")
def test_an_api_server_survives_broken_messages(
    num_messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    """On both of its sockets, while streams of a real rank run through the same ones: they end
    whole, the rank stays up, the log short and memory flat."""
    rng = random.Random(f"to the API server {num_messages}")
    process = psutil.Process()

    async def work(folder: Path) -> None:
        async with served(folder) as client:
            with hostile_engine(folder) as sockets:
                await hurt_client(client, sockets, rng, BATCH)
                memory = process.memory_info().rss
                await hurt_client(client, sockets, rng, num_messages - BATCH)
                assert process.memory_info().rss - memory < MAX_GROWTH_BYTES
            assert client.death is None
            assert client.engines[0].state == "up"
            assert client.num_in_flight == 0
            counts.append(client.num_bad_messages)

    counts: list[int] = []
    with socket_folder() as folder, FakeEngine(ipc_wires(folder), endless_answer, epoch=EPOCH):
        asyncio.run(asyncio.wait_for(work(folder), 300))
    assert counts[0] > num_messages / 4
    bad = [r for r in caplog.records if "dropped a bad message" in r.getMessage()]
    assert 1 <= len(bad) <= most_lines(counts[0])
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[EngineClient]:
    client = EngineClient()
    client.bind(ipc_wires(folder))
    try:
        await client.wait_ready(20)
        yield client
    finally:
        client.close()


async def hurt_client(
    client: EngineClient,
    sockets: Sequence["zmq.Socket[bytes]"],
    rng: random.Random,
    num_messages: int,
) -> None:
    """Send so many broken messages, each few hundred beside a stream of ours."""
    dealer, push = sockets
    ready = [bytes(frame) for frame in Encoder().encode(READY)]
    for number in range(num_messages // BATCH):
        before = client.num_bad_messages
        stream = client.stream(make_request(f"ours {number}", max_tokens=30))
        for _ in range(BATCH):
            if rng.random() < 0.2:
                dealer.send_multipart(mutate(rng, ready) or [b""])
            else:
                push.send_multipart(mutate(rng, rng.choice(TO_API_SERVER)) or [b""])
        push.send(b"the last of them")
        tokens: list[int] = []
        while not stream.is_finished:
            while (output := stream.take()) is None:
                await stream.wakeup.wait()
            tokens += unpack_tokens(output.new_token_ids)
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH
                break
        assert tokens == [*itertools.islice(endless_answer(make_request("")), 30)]
        deadline = time.monotonic() + 20
        while client.num_bad_messages < before + BATCH / 4:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)


# ---------------------------------------------------------------------------- to the coordinator


@QUICK_AND_LONG
@pytest.mark.row("F-23", "S-51")
def test_a_coordinator_survives_broken_messages(
    num_messages: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """On the wire of outputs, which any rank and API server may write to: loads are passed on."""
    rng = random.Random(f"to the coordinator {num_messages}")
    messages = [
        *TO_API_SERVER,
        frames_of(OutputType.OUTPUTS.value, EngineCoreOutputs(1, 7, wave_complete=1)),
        frames_of(b"\x03", StartWave(1, 0)),
    ]
    with run_coordinator(num_engines=2) as coordinator:
        peers = coordinator.peers
        peers.ready(0, EPOCH)
        say_load(peers, 1)
        memory = psutil.Process(coordinator.pid).memory_info().rss
        for number in range(num_messages // BATCH):
            for _ in range(BATCH):
                peers.send_raw(*(mutate(rng, rng.choice(messages)) or [b""]))
            say_load(peers, 100 + number)
        growth = psutil.Process(coordinator.pid).memory_info().rss - memory
        assert growth < MAX_GROWTH_BYTES
    lines = capfd.readouterr().err.splitlines()
    num_lines = sum("dropped a bad message" in line for line in lines)
    assert 1 <= num_lines <= most_lines(num_messages)
    assert not [line for line in lines if line.startswith("ERROR") or "Traceback" in line]


def say_load(peers: Peers, num_running: int) -> None:
    """As the rank that is there, and wait until API servers hear of it."""
    stats = SchedulerStats(0, num_running, 0.5)
    peers.send(OutputType.OUTPUTS.value, EngineCoreOutputs(0, EPOCH, stats=stats))
    peers.wait_for_running(num_running)


# ------------------------------------------------------------------------------------- too large


@pytest.mark.row("F-24")
def test_a_request_that_is_too_large_does_not_leave_the_api_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the client's to mend; the connection stays, and so does everybody else."""
    monkeypatch.setattr(engine_wire, "MAX_REQUEST_BYTES", 2000)
    long = SamplingParams(max_tokens=1, bad_words_token_ids=((70_000,) * 200,) * 10)

    async def work(folder: Path) -> None:
        async with served(folder) as client:
            request = msgspec.structs.replace(make_request("long"), sampling_params=long)
            with pytest.raises(InvalidRequestError, match="too large for an engine"):
                client.stream(request)
            assert client.num_in_flight == client.balancer.loads[0].num_own == 0
            stream = client.stream(make_request("short", max_tokens=1))
            while (output := stream.take()) is None:
                await stream.wakeup.wait()
            assert output.finish_reason is FinishReason.LENGTH

    with socket_folder() as folder, FakeEngine(ipc_wires(folder), endless_answer) as engine:
        asyncio.run(asyncio.wait_for(work(folder), 20))
    assert [request.request_id for request in engine.received] == ["short"]


@pytest.mark.row("F-24")
def test_no_request_that_a_client_can_make_is_too_large() -> None:
    """The most of everything that the sampling parameters take, at once."""
    everything = SamplingParams(
        max_tokens=1,
        logit_bias={70_000 + i: 1.5 for i in range(1024)},
        stop_token_ids=tuple(range(70_000, 70_064)),
        allowed_token_ids=tuple(range(70_000, 71_024)),
        bad_words_token_ids=((70_000,) * 256,) * 512,
        logprob_token_ids=tuple(range(70_000, 70_128)),
    )
    request = msgspec.structs.replace(
        make_request("r"),
        sampling_params=everything,
        cache_salt="s" * 1024,
        trace_headers={f"{i:01024}": "v" * 1024 for i in range(16)},
    )
    body, *_ = Encoder(MAX_REQUEST_BYTES).encode(request)
    assert len(body) + (256 << 10) < MAX_REQUEST_BYTES / 3


@pytest.mark.row("F-24")
def test_an_engine_core_refuses_a_body_that_is_too_large_by_name() -> None:
    """From a peer that has not looked: ERROR for that request, and its neighbour's tokens go on."""
    with run_core(step_delay_s=0.002) as core:
        core.api.add("neighbour", max_tokens=60)
        fields = msgspec.msgpack.decode(bytes(Encoder().encode(make_request("large"))[0]))
        body = msgspec.msgpack.encode([*fields, bytes(5 * MIB)])
        core.api.send(RequestType.ADD.value, body)
        ends = core.api.finish_all("large", "neighbour")

        assert ends["large"] == ([], FinishReason.ERROR)
        assert ends["neighbour"] == ([*range(100, 160)], FinishReason.LENGTH)
        assert statistics(core).num_dropped_messages == 1


@contextlib.contextmanager
def output_thread() -> Iterator[tuple[OutputThread, ApiPeer, list[BaseException]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    crashes: list[BaseException] = []
    with socket_folder() as folder, ApiPeer(folder) as peer:
        thread = OutputThread(
            context,
            [peer.output_address],
            engine_index=0,
            epoch=3,
            heartbeat_interval_s=60.0,
            progress=lambda: Progress(Phase.IDLE, 0.0, 7),
            on_crash=crashes.append,
        )
        thread.start()
        try:
            yield thread, peer, crashes
        finally:
            thread.finish("the test is over", linger_ms=0)
            context.term()


@pytest.mark.row("F-24")
def test_outputs_that_are_too_large_together_leave_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them, in order, the step's other news with the last; one that is too large by itself
    becomes an error of its request."""
    texts = [bytes([i]) * 4 * 700 for i in range(40)]
    texts[17] = bytes(4 * 20_000)
    outputs = [EngineCoreOutput(f"r{i}", text) for i, text in enumerate(texts)]
    with output_thread() as (thread, peer, crashes):
        monkeypatch.setattr(thread, "_encoder", Encoder(max_body_bytes=10_000))
        thread.put(0, EngineCoreOutputs(0, 3, outputs, SchedulerStats(1, 2, 0.5), 7.0))
        peer.wait_for(EngineCoreOutputs, lambda m: m.stats is not None)
        came = [m for m in peer.log if isinstance(m, EngineCoreOutputs)]
        received = [output for message in came for output in message.outputs]
        assert crashes == []

    assert len(came) > 10
    assert {message.timestamp for message in came} == {7.0}
    assert [output.request_id for output in received] == [f"r{i}" for i in range(40)]
    failed = received.pop(17)
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.details is not None
    assert "too large" in str(failed.details.error)
    assert [o.new_token_ids for o in received] == [t for t in texts if t != texts[17]]


@pytest.mark.row("F-24")
def test_the_answer_of_a_call_that_is_too_large_fails_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the thread goes on."""
    with output_thread() as (thread, peer, crashes):
        monkeypatch.setattr(thread, "_encoder", Encoder(max_body_bytes=10_000))
        result = msgspec.Raw(msgspec.msgpack.encode("x" * 20_000))
        thread.put(0, EngineCoreOutputs(0, 3, utility=UtilityOutput(5, result=result)))
        answer = peer.wait_for_answer()
        assert (answer.call_id, crashes) == (5, [])
    assert "too large" in str(answer.failure)


def test_a_plan_in_which_many_requests_begin_is_not_too_large_for_workers() -> None:
    """With as many banned words as there may be: clients could once make a plan that was larger
    than a worker took, and so its end."""
    params = SamplingParams(bad_words_token_ids=((70_000,) * 256,) * 512)
    tokens = np.arange(3, dtype="<u4")
    new = [NewRequest(f"r{i}", tokens, 3, 0, [i], params) for i in range(26)]
    plan = SchedulerOutput(1, {each.request_id: 3 for each in new}, new_requests=new)
    frames = rpc.encoder().encode(rpc.execute_model(plan, 0))

    assert sum(map(len, frames)) > codec.MAX_BODY_BYTES
    received = rpc.call_decoder().decode(frames)
    assert isinstance(received, rpc.ExecuteModel)
    assert len(received.args[0].new_requests) == 26


# ----------------------------------------------------------------------------------------- limits


@pytest.mark.row("S-51")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (EngineCoreOutputs, b"\x93\x00\x01\xdd\x00\x01\x00\x01"),  # one output too many
        (EngineCoreOutputs, b"\x93\x00\x01\xdd\xff\xff\xff\xff"),
        (list[str], b"\xdd\xff\xff\xff\xff"),
        (EngineCoreRequest, b"\x99\xa1r\xdd\xff\xff\xff\xff"),  # where an array of numbers belongs
        (Fingerprint, b"\x95\x01\xa1c\xdf\xff\xff\xff\xff"),
        (EngineCoreOutputs, b"\x93\x00\x01\x91\x92\xa1r\xc6\xff\xff\xff\xff"),
        (EngineDead, b"\x94\xb0ENGINE_CORE_DEAD\x00\x01\xdb\xff\xff\xff\xff"),
        (EngineCoreRequest, b"\x99\xa1r" + b"\x91" * MIB),
        (EngineCoreRequest, b"\x99\xa1r" + b"\x81\xa1k" * MIB),
        (Fence, b"\x91\xc9\x7f\xff\xff\xff\x01"),  # an extension of 2 GiB
    ],
    ids=str,
)
def test_lengths_that_are_not_there_cost_nothing(kind: Any, body: bytes) -> None:
    """Lists, maps, text, bytes and extensions of up to 2**32, nesting of a million: refused before
    anything of that size is made, in milliseconds."""
    process = psutil.Process()
    decode = codec.Decoder[Any](kind).decode
    memory, began = process.memory_info().rss, time.thread_time()
    for _ in range(3):
        with pytest.raises(WireError):
            decode([body])
    assert time.thread_time() - began < 0.2
    assert process.memory_info().rss - memory < 16 * MIB
