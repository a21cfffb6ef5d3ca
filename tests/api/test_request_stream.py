"""Outputs of one request on their way to its reader."""

import asyncio

import numpy as np
import pytest

from api.request_stream import RequestStream, Wakeup, merge
from engine.codec import pack_tokens, unpack_tokens
from engine.errors import EngineDeadError
from engine.wire import (
    EngineCoreEvent,
    EngineCoreOutput,
    EventKind,
    FinishReason,
    Logprobs,
    OutputDetails,
    PrefillStats,
)


def output(*tokens: int, finish: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput("r", pack_tokens(tokens), finish)


def make_stream(closed: list[str] | None = None) -> RequestStream:
    return RequestStream("r", (closed if closed is not None else []).append)


def test_slow_reader_gets_everything_at_once() -> None:
    """A thousand outputs that wait are one output: no queue builds up behind a slow reader."""
    stream = make_stream()
    for token in range(1000):
        stream.push(output(token), float(token))

    taken = stream.take()

    assert taken is not None
    assert unpack_tokens(taken.new_token_ids) == list(range(1000))
    assert stream.take() is None


def test_merged_output_keeps_every_detail() -> None:
    """Log probabilities and events are joined in order; what comes once is kept."""

    def logprobs(token: int) -> Logprobs:
        return Logprobs(
            np.array([[token, 1]], "<u4"), np.array([[-0.5, -1]], "<f4"), np.array([1], "<u4")
        )

    queued = EngineCoreEvent(EventKind.QUEUED, 1.0)
    preempted = EngineCoreEvent(EventKind.PREEMPTED, 2.0)
    first = OutputDetails(logprobs(5), events=[queued], prefill_stats=PrefillStats(3, 2))
    second = OutputDetails(logprobs(6), events=[preempted], error="why")

    merged = merge(
        [
            EngineCoreOutput("r", pack_tokens([5]), details=first),
            EngineCoreOutput("r", pack_tokens([6]), FinishReason.STOP, 6, second),
        ]
    )

    assert (merged.finish_reason, merged.stop_reason) == (FinishReason.STOP, 6)
    assert merged.details is not None
    assert merged.details.events == [queued, preempted]
    assert merged.details.prefill_stats == PrefillStats(3, 2)
    assert merged.details.error == "why"
    assert merged.details.new_logprobs is not None
    assert merged.details.new_logprobs.token_ids.tolist() == [[5, 1], [6, 1]]


def test_stream_that_has_ended_aborts_nothing() -> None:
    """Closing it after its finish reason was taken has no effect."""
    closed: list[str] = []
    stream = make_stream(closed)
    stream.push(output(1), 0.0)
    stream.push(output(2, finish=FinishReason.LENGTH), 0.0)

    taken = stream.take()
    stream.close()

    assert taken is not None
    assert (taken.finish_reason, stream.is_finished) == (FinishReason.LENGTH, True)
    assert closed == []


def test_closing_early_aborts_once() -> None:
    """However often it is closed."""
    closed: list[str] = []
    stream = make_stream(closed)

    stream.close()
    stream.close()

    assert closed == ["r"]


def test_failure_comes_after_what_was_waiting() -> None:
    """Tokens that arrived before the death are delivered; then it is raised, once."""
    stream = make_stream()
    stream.push(output(1), 0.0)
    stream.fail(EngineDeadError(0, "killed"))

    assert stream.take() is not None
    with pytest.raises(EngineDeadError):
        stream.take()
    assert stream.take() is None


def test_one_wakeup_serves_several_streams() -> None:
    """A reader of n continuations waits for any of them; nothing that came before is missed."""

    async def read() -> tuple[bool, bool]:
        wakeup = Wakeup()
        first, second = (RequestStream(n, lambda _: None, wakeup) for n in "ab")
        second.push(output(1), 0.0)
        await asyncio.wait_for(wakeup.wait(), 5)
        asyncio.get_running_loop().call_soon(first.push, output(2), 0.0)
        await asyncio.wait_for(wakeup.wait(), 5)
        return first.take() is not None, second.take() is not None

    assert asyncio.run(read()) == (True, True)
