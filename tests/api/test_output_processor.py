"""An engine core's outputs, as a reader gets them."""

import itertools
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.output_processor import LEAST_LOGPROB, OutputDelta, OutputProcessor
from api.sampling import SamplingParams
from api.tokenizer import Tokenizer
from engine.codec import pack_tokens
from engine.errors import InvalidRequestError
from engine.structured_output import StructuredOutput
from engine.wire import (
    EngineCoreEvent,
    EngineCoreOutput,
    EventKind,
    FinishReason,
    Logprobs,
    OutputDetails,
    PrefillStats,
)
from tests.helpers.counted_calls import counted_calls
from tests.helpers.tiny_tokenizers import byte_level

PROMPT = [10, 11, 12]


@lru_cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), {"bos_token": "<s>", "eos_token": "</s>"})


def make(**params: Any) -> OutputProcessor:
    return OutputProcessor(tokenizer(), SamplingParams(**params), PROMPT)


def ids(text: str) -> list[int]:
    """One token per byte, so that everything crosses token borders."""
    return [i for char in text for i in tokenizer().encode(char, add_special_tokens=False)]


def output(token_ids: list[int], **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput("r", pack_tokens(token_ids), **fields)


def push_each(processor: OutputProcessor, token_ids: list[int]) -> list[OutputDelta]:
    deltas = [processor.push(output([i])) for i in token_ids]
    return [delta for delta in deltas if delta is not None]


def test_text_arrives_with_its_tokens() -> None:
    """And joined it is the whole text."""
    processor = make()
    deltas = push_each(processor, ids("naïve 漢字"))

    assert "".join(delta.text for delta in deltas) == "naïve 漢字"
    assert [i for delta in deltas for i in delta.token_ids] == ids("naïve 漢字")
    assert processor.num_output_tokens == len(ids("naïve 漢字"))


_TEXTS = st.text("ab漢\n", max_size=12)


@settings(max_examples=300)
@given(
    _TEXTS,
    st.lists(st.text("ab漢\n", min_size=1, max_size=3), min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.integers(1, 4), min_size=1),
)
def test_stop_strings_cut_the_same_wherever_tokens_and_outputs_do(
    text: str, stops: list[str], includes: bool, sizes: list[int]
) -> None:
    """Where the first of several is complete, the longest of those that end there; the tokens that
    count are those that its last character needs."""
    ends = {
        end: max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        for end in range(len(text) + 1)
    }
    end, stop = next(((end, s) for end, s in ends.items() if s), (len(text), None))
    kept = text[:end] if includes or stop is None else text[: end - len(stop)]
    processor = make(stop=stops, include_stop_str_in_output=includes, max_tokens=100)

    tokens, sent, counted = ids(text), "", 0
    for size in itertools.cycle(sizes):
        piece, tokens = tokens[:size], tokens[size:]
        last = {} if tokens else {"finish_reason": FinishReason.LENGTH}
        delta = processor.push(output(piece, **last))
        if delta is not None:
            sent += delta.text
            counted += len(delta.token_ids)
        if not tokens:
            break

    assert sent == kept
    assert counted == processor.num_output_tokens == len(ids(text[:end]))
    assert (processor.is_finished, delta.stop_reason if delta else stop) == (True, stop)


@pytest.mark.parametrize("is_one_output", [True, False])
def test_a_stop_string_ends_the_text_and_the_count(is_one_output: bool) -> None:
    """Wherever the outputs are cut: text before it, tokens up to the one that completed it."""
    processor = make(stop=["END", "never"])
    tokens = ids("some ENDless text")
    deltas = (
        [d for d in [processor.push(output(tokens))] if d is not None]
        if is_one_output
        else push_each(processor, tokens)
    )

    assert "".join(delta.text for delta in deltas) == "some "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "END")
    assert processor.num_output_tokens == len(ids("some END"))
    assert [i for delta in deltas for i in delta.token_ids] == ids("some END")


def test_a_stop_string_may_stay_in_the_text() -> None:
    """`include_stop_str_in_output` (A04)."""
    deltas = push_each(make(stop="X2", include_stop_str_in_output=True), ids("one X2 two"))

    assert "".join(delta.text for delta in deltas) == "one X2"
    assert deltas[-1].stop_reason == "X2"


def test_an_unused_stop_string_changes_nothing() -> None:
    """The same pieces of text as without one (A02)."""
    text = "The quick brown fox, and 漢字."
    plain = [delta.text for delta in push_each(make(), ids(text))]

    watched = [delta.text for delta in push_each(make(stop="@@never@@"), ids(text))]

    assert watched == plain


def test_what_was_held_leaves_at_the_end() -> None:
    """The beginning of a stop string that never came, and half a character as U+FFFD."""
    processor = make(stop="END")
    tokens = [*ids("tail EN"), ids("漢")[0]]
    processor.push(output(tokens[:-1]))

    delta = processor.push(output(tokens[-1:], finish_reason=FinishReason.LENGTH))

    assert delta is not None
    assert delta.text == "EN\ufffd"
    assert (delta.finish_reason, delta.stop_reason) == ("length", None)


def test_a_stop_string_beats_the_engines_own_reason() -> None:
    """It came first, or with the same token."""
    processor = make(stop="END")

    delta = processor.push(output(ids("the END"), finish_reason=FinishReason.LENGTH))

    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("the ", "stop", "END")


def test_stop_strings_wait_for_min_tokens() -> None:
    """One that is complete before counts no more than an end token would."""
    processor = make(stop="ab", min_tokens=3)
    deltas = push_each(processor, ids("ab ab ab"))

    assert "".join(delta.text for delta in deltas) == "ab "
    assert processor.num_output_tokens == 5


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_the_stop_token_counts_but_does_not_show(includes: bool, skips: bool) -> None:
    """Unless both its kind and the stop itself are to be shown."""
    end = tokenizer().token_id("</s>") or 0
    processor = make(include_stop_str_in_output=includes, skip_special_tokens=skips)

    delta = processor.push(output([*ids("so"), end], finish_reason=FinishReason.STOP))

    assert delta is not None
    assert delta.text == ("so</s>" if includes and not skips else "so")
    assert delta.token_ids[-1] == end
    assert processor.num_output_tokens == 3
    assert (delta.finish_reason, delta.stop_reason) == ("stop", None)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_each_reason_has_its_word(reason: FinishReason) -> None:
    """The wire has numbers, readers get words; a stop token's id or an error's cause come along."""
    fields: dict[str, Any] = {"finish_reason": reason}
    if reason is FinishReason.ERROR:
        fields["details"] = OutputDetails(error="out of luck")
    if reason is FinishReason.STOP:
        fields["stop_reason"] = 9

    delta = make(stop_token_ids=[9]).push(output([9], **fields))

    assert delta is not None
    assert delta.finish_reason == reason.name.lower()
    assert str(delta.failure) == ("out of luck" if reason is FinishReason.ERROR else "None")
    assert delta.stop_reason == (9 if reason is FinishReason.STOP else None)


def test_nothing_comes_after_the_end() -> None:
    """Steps that were under way when the stop string came bring tokens that nobody asked for."""
    processor = make(stop="E")
    push_each(processor, ids("xE"))

    assert processor.is_finished
    assert processor.push(output(ids("more"))) is None
    assert processor.push(output([], finish_reason=FinishReason.ABORT)) is None
    assert processor.num_output_tokens == 2


def test_a_change_of_state_is_no_delta() -> None:
    """But what it says about the cache is remembered."""
    processor = make()
    event = EngineCoreEvent(EventKind.QUEUED, 1.0)
    assert processor.push(output([], details=OutputDetails(events=[event]))) is None

    delta = processor.push(output([5], details=OutputDetails(prefill_stats=PrefillStats(3, 2))))

    assert delta is not None
    assert processor.num_cached_tokens == 2


def logprobs(rows: list[list[int]], values: list[list[float]], ranks: list[int]) -> Logprobs:
    return Logprobs(np.array(rows, "<u4"), np.array(values, "<f4"), np.array(ranks, "<u4"))


def test_log_probabilities_have_names_and_no_infinity() -> None:
    """Text, bytes and rank of each token; -inf, which JSON lacks, is -9999.0 (D04)."""
    part = ids("漢")[0]
    new = logprobs([[part, 5, part]], [[-2.0, -0.5, -np.inf]], [7])

    delta = make(logprobs=2).push(output([part], details=OutputDetails(new_logprobs=new)))

    assert delta is not None
    assert delta.logprobs is not None
    (position,) = delta.logprobs
    assert (position.chosen.token, position.chosen.bytes) == ("\ufffd", "漢".encode()[:1])
    assert (position.chosen.logprob, position.chosen.rank) == (-2.0, 7)
    assert [(entry.logprob, entry.rank) for entry in position.top] == [
        (-0.5, 1),
        (LEAST_LOGPROB, 2),
    ]


def test_log_probabilities_end_with_the_tokens_that_count() -> None:
    """A stop string in the middle of an output cuts both at the same place."""
    tokens = ids("aEb")
    new = logprobs([[i] for i in tokens], [[-1.0]] * 3, [1] * 3)

    delta = make(stop="E", logprobs=0).push(output(tokens, details=OutputDetails(new_logprobs=new)))

    assert delta is not None
    assert delta.logprobs is not None
    assert [position.chosen.token_id for position in delta.logprobs] == tokens[:2]
    assert delta.token_ids == tokens[:2]
    assert all(position.top == [] for position in delta.logprobs)


def test_prompt_log_probabilities_come_without_tokens_too() -> None:
    """A prompt that takes several steps may bring them before its first token."""
    found = logprobs([[11], [12]], [[-1.0], [-2.0]], [1, 2])

    delta = make(prompt_logprobs=0).push(output([], details=OutputDetails(prompt_logprobs=found)))

    assert delta is not None
    assert delta.prompt_logprobs is not None
    assert [position.chosen.token_id for position in delta.prompt_logprobs] == [11, 12]
    assert delta.finish_reason is None


def test_the_fifty_thousandth_output_costs_what_the_first_does() -> None:
    """In calls, with stop strings that nearly come all the time and log probabilities."""
    processor = make(stop=["aab", "END"], logprobs=1, max_tokens=None)
    tokens = itertools.cycle(ids("aaaa 漢 EN"))

    def cost(count: int) -> float:
        outputs = [
            output([i], details=OutputDetails(new_logprobs=logprobs([[i, 5]], [[-1.0, -2.0]], [1])))
            for i in itertools.islice(tokens, count)
        ]
        with counted_calls() as calls:
            for each in outputs:
                processor.push(each)
        return calls.count / count

    cost(100)  # what is looked up once
    first = cost(1_000)
    for i in itertools.islice(tokens, 48_000):
        processor.push(output([i]))
    assert cost(1_000) == pytest.approx(first, rel=0.1)


def test_an_error_is_the_clients_where_the_engine_says_so() -> None:
    """Refused after it was sent: with code and field, as what is refused before."""
    details = OutputDetails(error="no schema", error_code="invalid_value", error_param="schema")
    delta = make().push(output([], finish_reason=FinishReason.ERROR, details=details))
    assert delta is not None
    assert isinstance(delta.failure, InvalidRequestError)
    assert (str(delta.failure), delta.failure.param) == ("no schema", "schema")
    assert delta.failure.code == "invalid_value"


def test_a_structured_output_that_is_whole_ends_without_an_end_token() -> None:
    """Its last token is text, and shows; a real end token does not."""
    end = tokenizer().token_id("</s>") or 0
    for token_ids in (ids("so"), [*ids("so"), end]):
        processor = make(structured_output=StructuredOutput("regex", "so+"))
        delta = processor.push(output(token_ids, finish_reason=FinishReason.STOP))
        assert delta is not None
        assert (delta.text, delta.token_ids) == ("so", token_ids)
