"""A rank that is lost takes no stream along: others go on where it stopped. Over real sockets, with
engine cores that speak wire 1 from threads."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.engine_handle import Loss
from api.request_stream import RequestStream
from engine.bound import ServerWires
from engine.codec import unpack_tokens
from engine.errors import EngineDeadError, RequestFailedError, UnavailableError
from engine.sampling_params import SamplingParams
from engine.wire import EngineCoreOutput, EngineCoreRequest, FinishReason
from tests.helpers.connected_client import connected, make_request, run_once, until
from tests.helpers.fake_engine import FINGERPRINT, FakeEngine, endless_answer
from tests.helpers.outputs import read
from tests.helpers.wires import ipc_wires

NUM_TOKENS = 30


@pytest.fixture
def wires(tmp_path: Path) -> ServerWires:
    return ipc_wires(tmp_path)


def counting_answer(request: EngineCoreRequest) -> Iterator[int]:
    """97, 98, … up to as many as the request wants."""
    return endless_answer(request)


def a_request(request_id: str = "r", **params: Any) -> EngineCoreRequest:
    request = make_request(request_id)
    wanted = SamplingParams(max_tokens=NUM_TOKENS, **params)
    return msgspec.structs.replace(request, sampling_params=wanted)


def replacing(wires: ServerWires, num_engines: int = 2, **options: Any) -> Any:
    return connected(wires, num_engines, replaces_ranks=True, **options)


async def take_some(stream: RequestStream, num_tokens: int) -> list[EngineCoreOutput]:
    """Outputs until there are so many tokens."""
    outputs: list[EngineCoreOutput] = []
    while len(tokens_of(outputs)) < num_tokens:
        await stream.wakeup.wait()
        while (output := stream.take()) is not None:
            outputs.append(output)
    return outputs


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [t for output in outputs for t in unpack_tokens(output.new_token_ids)]


EXPECTED = [97 + i % 26 for i in range(NUM_TOKENS)]


@pytest.mark.parametrize("how", ["last words", "told", "silent"])
def test_a_stream_goes_on_where_it_stopped(wires: ServerWires, how: str) -> None:
    """No token lost, none doubled, one end; whoever notices the loss."""
    losses: list[Loss] = []

    async def work(first: FakeEngine, second: FakeEngine) -> None:
        async with replacing(wires, heartbeat_timeout_s=2.0) as client:
            client.deaths.on_loss = losses.append
            second.is_paused = True
            request = msgspec.structs.replace(a_request(), data_parallel_rank=0)
            stream = client.stream(request)
            first.step_s = 0.002
            outputs = await take_some(stream, 5)
            first.is_paused = True
            if how == "last words":
                await asyncio.to_thread(first.die, "out of memory")
            elif how == "told":
                client.lose(0, 0, "killed by SIGKILL")
            else:
                first.is_silent = True
            await until(lambda: second.received)
            second.is_paused = False
            outputs += await read(stream)
            assert tokens_of(outputs) == EXPECTED
            assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
            given = second.received[0].output_token_ids
            assert given is not None
            assert 5 <= len(given) < NUM_TOKENS
            assert given.tolist() == EXPECTED[: len(given)]
            assert client.num_up == 1
            assert client.num_in_flight == 0
            assert [load.num_own for load in client.balancer.loads] == [0, 0]

    with (
        FakeEngine(wires, counting_answer) as first,
        FakeEngine(wires, counting_answer, index=1) as second,
    ):
        run_once(work(first, second))
    assert [(loss.engine_index, loss.epoch) for loss in losses] == (
        [] if how == "told" else [(0, 0)]
    )


def test_streams_wait_where_no_rank_is_up_and_go_on_at_the_successor(wires: ServerWires) -> None:
    """Under the next epoch; new requests are told to come back meanwhile."""

    async def work() -> None:
        async with replacing(wires, 1) as client:
            stream = client.stream(a_request())
            outputs = await take_some(stream, 3)
            client.lose(0, 0, "killed")
            with pytest.raises(UnavailableError):
                client.stream(a_request("new"))
            with FakeEngine(wires, counting_answer, epoch=1) as successor:
                outputs += await read(stream)
                assert tokens_of(outputs) == EXPECTED
                assert successor.received[0].request_id == "r"
                assert client.num_up == 1
                assert client.engines[0].epoch == 1

    with FakeEngine(wires, counting_answer, step_s=0.002):
        run_once(work())


def test_what_an_incarnation_says_after_it_was_given_up_is_dropped(wires: ServerWires) -> None:
    """It is told that it has been, and its tokens reach nobody."""

    async def work(old: FakeEngine, other: FakeEngine) -> None:
        async with replacing(wires) as client:
            stream = client.stream(msgspec.structs.replace(a_request(), data_parallel_rank=0))
            outputs = await take_some(stream, 3)
            client.lose(0, 0, "its link is cut")
            outputs += await read(stream)
            assert tokens_of(outputs) == EXPECTED
            await until(lambda: old.fences)
            assert old.fences[0].epoch == 0
            assert client.num_stale_messages > 0
            assert not other.fences

    with (
        FakeEngine(wires, counting_answer, step_s=0.002) as old,
        FakeEngine(wires, counting_answer, index=1) as other,
    ):
        run_once(work(old, other))


def test_a_prompt_is_told_of_once(wires: ServerWires) -> None:
    """Its log probabilities and what of it was cached come from the first rank alone."""

    async def work(first: FakeEngine, second: FakeEngine) -> None:
        async with replacing(wires) as client:
            request = a_request(logprobs=2, prompt_logprobs=1)
            stream = client.stream(msgspec.structs.replace(request, data_parallel_rank=0))
            outputs = await take_some(stream, 3)
            client.lose(0, 0, "killed")
            outputs += await read(stream)
            details = [output.details for output in outputs if output.details is not None]
            assert len([d for d in details if d.prompt_logprobs is not None]) == 1
            assert len([d for d in details if d.prefill_stats is not None]) == 1
            logprobs = [d.new_logprobs for d in details if d.new_logprobs is not None]
            assert sum(len(each.token_ids) for each in logprobs) == NUM_TOKENS
            params = second.received[0].sampling_params
            assert params is not None
            assert params.prompt_logprobs is None

    with (
        FakeEngine(wires, counting_answer, step_s=0.002) as first,
        FakeEngine(wires, counting_answer, index=1) as second,
    ):
        run_once(work(first, second))


def test_a_request_that_every_rank_dies_of_fails_in_the_end(wires: ServerWires) -> None:
    """Others that were beside it go on."""

    async def work() -> None:
        async with replacing(wires, 1) as client:
            stream = client.stream(a_request())
            for epoch in range(4):
                client.lose(0, epoch, "segmentation fault")
                with FakeEngine(wires, counting_answer, epoch=epoch + 1) as successor:
                    successor.is_paused = True
                    if epoch < 3:
                        await until(lambda: successor.received)
            with pytest.raises(RequestFailedError, match="4 engine cores in a row"):
                await read(stream)
            assert client.num_in_flight == 0

    with FakeEngine(wires, counting_answer) as engine:
        engine.is_paused = True
        run_once(work())


def test_an_aborted_request_is_not_handed_on(wires: ServerWires) -> None:
    """Neither one that waits for a rank."""

    async def work() -> None:
        async with replacing(wires, 1) as client:
            stream = client.stream(a_request())
            kept = client.stream(a_request("kept"))
            await take_some(stream, 2)
            client.lose(0, 0, "killed")
            stream.close()
            with FakeEngine(wires, counting_answer, epoch=1) as successor:
                await read(kept)
                assert [each.request_id for each in successor.received] == ["kept"]

    with FakeEngine(wires, counting_answer, step_s=0.002):
        run_once(work())


def test_calls_to_a_lost_rank_fail_and_others_are_answered(wires: ServerWires) -> None:
    async def work(first: FakeEngine) -> None:
        async with replacing(wires) as client:
            first.answers_calls = False
            call = asyncio.create_task(client.utility("statistics", engine_index=0))
            await until(lambda: first.calls)
            client.lose(0, 0, "killed")
            with pytest.raises(UnavailableError, match="being replaced"):
                await call
            assert len(await client.utility("statistics")) == 1

    with (
        FakeEngine(wires, counting_answer) as first,
        FakeEngine(wires, counting_answer, index=1),
    ):
        run_once(work(first))


def test_a_successor_that_differs_is_refused(wires: ServerWires) -> None:
    """It is a loss like another: the rest serves on."""
    losses: list[Loss] = []

    async def work() -> None:
        async with replacing(wires) as client:
            client.deaths.on_loss = losses.append
            client.lose(0, 0, "killed")
            other_code = msgspec.structs.replace(FINGERPRINT, code="edited")
            with FakeEngine(wires, counting_answer, epoch=1, fingerprint=other_code) as successor:
                await until(lambda: losses)
                assert "code" in losses[0].cause
                assert losses[0].epoch == 1
                await until(lambda: successor.fences)
            outputs = await read(client.stream(a_request()))
            assert tokens_of(outputs) == EXPECTED

    with (
        FakeEngine(wires, counting_answer),
        FakeEngine(wires, counting_answer, index=1),
    ):
        run_once(work())


def test_a_loss_that_is_told_late_does_not_touch_the_successor(wires: ServerWires) -> None:
    async def work(first: FakeEngine) -> None:
        async with replacing(wires, 1) as client:
            client.lose(0, 0, "killed")
            with FakeEngine(wires, counting_answer, epoch=1):
                await until(lambda: client.num_up)
                client.lose(0, 0, "killed")
                assert client.num_up == 1
                assert tokens_of(await read(client.stream(a_request()))) == EXPECTED

    with FakeEngine(wires, counting_answer) as first:
        run_once(work(first))


def test_a_successor_that_is_heard_of_before_the_loss_gets_the_streams(
    wires: ServerWires,
) -> None:
    """The two come by different ways. What is told late then changes nothing."""

    async def work(old: FakeEngine) -> None:
        async with replacing(wires, 1) as client:
            stream = client.stream(a_request())
            outputs = await take_some(stream, 3)
            old.is_paused = True
            with FakeEngine(wires, counting_answer, epoch=1):
                outputs += await read(stream)
                client.lose(0, 0, "killed")
                assert tokens_of(outputs) == EXPECTED
                assert client.num_up == 1

    with FakeEngine(wires, counting_answer, step_s=0.002) as old:
        run_once(work(old))


def test_ranks_that_come_back_together_share_the_streams(wires: ServerWires) -> None:
    """Each goes to one of them: a READY that is read in between sends none of them twice."""

    async def work() -> None:
        async with replacing(wires) as client:
            streams = [client.stream(a_request(f"r{i}")) for i in range(40)]
            client.lose(0, 0, "killed")
            client.lose(1, 0, "killed")
            with (
                FakeEngine(wires, counting_answer, epoch=1) as first,
                FakeEngine(wires, counting_answer, index=1, epoch=1) as second,
            ):
                for stream in streams:
                    assert tokens_of(await read(stream)) == EXPECTED
                received = [each.request_id for each in (*first.received, *second.received)]
                assert sorted(received) == sorted(f"r{i}" for i in range(40))
                assert [load.num_own for load in client.balancer.loads] == [0, 0]

    with (
        FakeEngine(wires, counting_answer) as first,
        FakeEngine(wires, counting_answer, index=1) as second,
    ):
        first.is_paused = second.is_paused = True
        run_once(work())


def test_without_the_option_a_death_ends_the_service(wires: ServerWires) -> None:
    async def work(first: FakeEngine) -> None:
        async with connected(wires, 2) as client:
            stream = client.stream(a_request())
            await asyncio.to_thread(first.die, "out of memory")
            with pytest.raises(EngineDeadError):
                await read(stream)

    with (
        FakeEngine(wires, endless_answer) as first,
        FakeEngine(wires, endless_answer, index=1),
    ):
        first.is_paused = True
        run_once(work(first))
