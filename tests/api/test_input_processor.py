"""What is checked before anything reaches an engine core."""

import json
import time
from typing import Any

import numpy as np
import pytest

from api.input_processor import InputProcessor
from api.sampling import SamplingParams
from api.tokenizer import Tokenizer
from engine.errors import ContextLengthError, InvalidRequestError
from tests.helpers.tiny_tokenizers import byte_level, with_begin

MAX_LEN = 32
VOCAB = 512


def make(eos_token_ids: tuple[int, ...] = (1, 5)) -> InputProcessor:
    tokenizer = Tokenizer(
        with_begin(byte_level()), {"bos_token": "<s>"}, model_eos_token_ids=eos_token_ids
    )
    return InputProcessor(tokenizer, max_model_len=MAX_LEN, vocab_size=VOCAB)


def max_tokens_of(num_prompt_tokens: int, max_tokens: int | None = None, **options: Any) -> int:
    """What the engine is told."""
    params = SamplingParams(max_tokens=max_tokens)
    (request,) = make().make_requests([7] * num_prompt_tokens, params, **options)
    assert request.sampling_params is not None
    assert request.sampling_params.max_tokens is not None
    return request.sampling_params.max_tokens


@pytest.mark.parametrize("text", [""])
def test_an_empty_text_is_refused(text: str) -> None:
    """Also where the tokenizer would make a begin token of it (E01)."""
    with pytest.raises(InvalidRequestError, match="prompt must not be empty"):
        make().encode(text)


@pytest.mark.row("F-33")
def test_a_prompt_may_fill_all_but_one_token() -> None:
    """The model's length counts prompt and output together (F-33)."""
    assert max_tokens_of(MAX_LEN - 1) == 1
    for too_long in (MAX_LEN, MAX_LEN + 1):
        with pytest.raises(ContextLengthError, match=str(too_long)):
            max_tokens_of(too_long)


@pytest.mark.row("F-33")
def test_too_long_is_told_in_the_words_that_clients_look_for() -> None:
    """LiteLLM, and agents that shorten a conversation, know no other sign of it."""
    words = f"(?i)this model's maximum context length is {MAX_LEN} tokens"
    with pytest.raises(ContextLengthError, match=words):
        max_tokens_of(MAX_LEN)
    with pytest.raises(ContextLengthError, match=words):
        max_tokens_of(MAX_LEN - 4, max_tokens=5)


def test_a_text_that_cannot_fit_is_not_tokenized() -> None:
    """Megabytes would take seconds; what is long but short in tokens still passes (F-34)."""
    tokenizer = Tokenizer(byte_level(), {})
    inputs = InputProcessor(tokenizer, max_model_len=1000, vocab_size=VOCAB)
    text = "x y z " * 100_000
    began = time.process_time()
    with pytest.raises(ContextLengthError, match="600000 characters"):
        inputs.encode(text)
    refused_s = time.process_time() - began
    tokenizer.encode(text)

    assert refused_s < (time.process_time() - began) / 10
    assert len(inputs.encode("<|turn|>" * 900)) == 900


@pytest.mark.row("F-33")
def test_max_tokens_must_fit_behind_the_prompt() -> None:
    """One more than fits is an error (E03), with what would fit; it is never cut silently."""
    assert max_tokens_of(10, MAX_LEN - 10) == MAX_LEN - 10
    with pytest.raises(ContextLengthError, match="to 22 or"):
        max_tokens_of(10, MAX_LEN - 9)


def test_without_max_tokens_a_default_or_all_the_room_is_meant() -> None:
    """Chats take what is left, completions a number, as far as it fits."""
    assert max_tokens_of(10) == MAX_LEN - 10
    assert max_tokens_of(10, default_max_tokens=16) == 16
    assert max_tokens_of(20, default_max_tokens=16) == 12
    assert max_tokens_of(20, 16, cuts_max_tokens=True) == 12


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, 2**63, 10**30, 1.5, True, "5", None])
def test_only_the_embeddings_ids_are_prompt_tokens(bad: Any) -> None:
    """Anything else is refused with the value, whatever its type (F-35)."""
    with pytest.raises(InvalidRequestError, match="no token id") as refused:
        make().make_requests([5, bad], SamplingParams(), param="prompts[3]")

    assert refused.value.param == "prompts[3]"


def test_ids_beyond_the_tokenizer_are_the_models_own() -> None:
    """The embedding is the limit, not the tokenizer; arrays count too."""
    (request,) = make().make_requests(np.array([VOCAB - 1]), SamplingParams())

    assert request.prompt_token_ids is not None
    assert request.prompt_token_ids.dtype == np.dtype("<u4")
    assert request.prompt_token_ids.tolist() == [VOCAB - 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_token_ids", [VOCAB]), ("logit_bias", {VOCAB: 1}), ("allowed_token_ids", [VOCAB])],
)
def test_parameters_name_no_token_that_is_not_there(field: str, value: Any) -> None:
    """The engine would look it up in the logits."""
    params = SamplingParams(**{field: value})
    with pytest.raises(InvalidRequestError) as refused:
        make().make_requests([5], params)

    assert refused.value.param == field


@pytest.mark.row("S-55")
def test_ids_are_unique_whatever_clients_send() -> None:
    """Twice the same name, and each of its continuations: five different ids, readable in logs."""
    inputs = make()
    requests = [
        *inputs.make_requests([5], SamplingParams(n=3), request_id="mine" * 50),
        *inputs.make_requests([5], SamplingParams(), request_id="mine" * 50),
        *inputs.make_requests([5], SamplingParams()),
    ]

    ids = {request.request_id for request in requests}

    assert len(ids) == 5
    assert sum(i.startswith("minemine") for i in ids) == 4
    assert max(map(len, ids)) < 100


def test_continuations_share_the_prompt_and_differ_in_seed() -> None:
    """One array, however many they are."""
    first, second = make().make_requests([5, 6], SamplingParams(n=2, seed=40))

    assert first.prompt_token_ids is second.prompt_token_ids
    assert first.sampling_params is not None
    assert second.sampling_params is not None
    assert (first.sampling_params.seed, second.sampling_params.seed) == (40, 41)


def test_the_models_end_tokens_go_with_each_request() -> None:
    """Except those that its embedding does not have."""
    (request,) = make((1, 5, VOCAB)).make_requests([5], SamplingParams())

    assert request.sampling_params is not None
    assert request.sampling_params.eos_token_ids == (1, 5)


def test_an_id_of_any_json_number_is_judged(tmp_path: Any) -> None:
    """Numbers as JSON brings them, up to hundreds of digits."""
    for text in ("[1e400]", "[-0]", "[1" + "0" * 400 + "]"):
        token_ids = json.loads(text)
        if token_ids == [0]:
            make().make_requests(token_ids, SamplingParams())
        else:
            with pytest.raises(InvalidRequestError):
                make().make_requests(token_ids, SamplingParams())
