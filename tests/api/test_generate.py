"""The sequences of one request, run together."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api.generate import Choice, Generation, Prompt
from api.metrics import Metrics
from api.output_processor import OutputProcessor
from api.request_stream import RequestStream, Wakeup
from api.route_headers import RouteWish
from api.sampling import SamplingParams
from api.service import Service
from api.tokenizer import Tokenizer
from engine.codec import pack_tokens
from engine.errors import (
    EngineDeadError,
    InvalidRequestError,
    RaywireError,
    RequestFailedError,
)
from engine.wire import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EventKind,
    FinishReason,
    OutputDetails,
)
from tests.helpers import byte_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_folder.make(tmp_path_factory.mktemp("model")))


class Running:
    """A generation whose engine core is the test."""

    def __init__(self, tokenizer: Tokenizer, num_choices: int = 1) -> None:
        self.generation = Generation()
        self.aborted: list[str] = []
        metrics = Metrics("m", 1)
        self.streams: list[RequestStream] = []
        for index in range(num_choices):
            record = metrics.record(0.0)
            stream = RequestStream(str(index), self.aborted.append, self.generation.wakeup, record)
            processor = OutputProcessor(tokenizer, SamplingParams(), [97])
            self.streams.append(stream)
            self.generation.add(Choice(index, processor, stream, record))

    def read(
        self, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[list[tuple[int, str]], BaseException | None]:
        """The text of each delta, and the error behind them. `meanwhile` runs while the reader
        waits."""
        texts: list[tuple[int, str]] = []

        async def work() -> None:
            asyncio.get_running_loop().call_soon(meanwhile)
            while not self.generation.is_over:
                batch = await self.generation.news()
                texts.extend((choice.index, delta.text) for choice, delta in batch)

        try:
            asyncio.run(asyncio.wait_for(work(), 10))
        except RaywireError as error:
            return texts, error
        return texts, None


def output(text: str = "", finish: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput("r", pack_tokens(list(text.encode())), finish)


def test_death_right_after_a_change_of_state_reaches_the_reader(tokenizer: Tokenizer) -> None:
    """Both were waiting when the reader woke up: it must not go back to sleep between them."""
    running = Running(tokenizer)
    scheduled = OutputDetails(events=[EngineCoreEvent(EventKind.SCHEDULED, 1.0)])

    def die() -> None:
        running.streams[0].push(EngineCoreOutput("r", b"", details=scheduled), 1.0)
        running.streams[0].fail(EngineDeadError(0, "killed"))

    texts, error = running.read(die)

    assert texts == []
    assert isinstance(error, EngineDeadError)


def test_death_right_after_a_token_reaches_the_reader(tokenizer: Tokenizer) -> None:
    """The token answers the reader's one call; the death behind it needs another."""
    running = Running(tokenizer)

    def die() -> None:
        running.streams[0].push(output("a"), 1.0)
        running.streams[0].fail(EngineDeadError(0, "killed"))

    texts, error = running.read(die)

    assert texts == [(0, "a")]
    assert isinstance(error, EngineDeadError)


def test_what_siblings_have_received_comes_before_the_error(tokenizer: Tokenizer) -> None:
    """The first of two has nothing waiting but its death."""
    running = Running(tokenizer, 2)
    running.streams[1].push(output("b"), 1.0)
    for stream in running.streams:
        stream.fail(EngineDeadError(0, "killed"))

    texts, error = running.read()

    assert texts == [(1, "b")]
    assert isinstance(error, EngineDeadError)


def test_failed_sequence_ends_its_siblings(tokenizer: Tokenizer) -> None:
    """Those that still run are aborted, and the error comes also where the failed one was the last
    to run."""
    for is_last in (False, True):
        running = Running(tokenizer, 2)
        running.streams[0].push(output(finish=FinishReason.ERROR), 1.0)
        running.streams[1].push(output("b", FinishReason.STOP if is_last else None), 1.0)

        texts, error = running.read()

        assert texts == [(1, "" if is_last else "b")]
        assert isinstance(error, RequestFailedError)
        assert running.aborted == ([] if is_last else ["1"])


def test_a_request_that_the_engine_refuses_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    """Its error ends all of it, as one that was found before sending would."""
    running = Running(tokenizer, 2)
    details = OutputDetails(error="no", error_code="invalid_value", error_param="p")
    running.streams[0].push(EngineCoreOutput("0", b"", FinishReason.ERROR, details=details), 1.0)

    _, error = running.read()

    assert isinstance(error, InvalidRequestError)
    assert error.param == "p"
    assert running.aborted == ["1"]


def test_others_get_their_turn_while_many_sequences_are_sent(tokenizer: Tokenizer) -> None:
    """A request may have a thousand of them."""
    sent: list[object] = []
    turns: list[int] = []

    def stream(request: object, wakeup: Wakeup, **_: Any) -> RequestStream:
        sent.append(request)
        return RequestStream("r", lambda _: None, wakeup)

    async def work() -> None:
        processor = OutputProcessor(tokenizer, SamplingParams(), [97])
        prompt = Prompt([97], [cast(EngineCoreRequest, i) for i in range(1000)])
        service = SimpleNamespace(client=SimpleNamespace(stream=stream), metrics=Metrics("m", 1))
        launch = asyncio.ensure_future(
            Generation().launch(
                cast(Service, service), [prompt], [processor] * 1000, 0.0, RouteWish()
            )
        )
        while not launch.done():
            await asyncio.sleep(0)
            turns.append(len(sent))

    asyncio.run(work())

    assert turns[-1] == len(sent) == 1000
    assert max(now - before for before, now in pairwise(turns)) <= 32
