"""Log probabilities in the routes' shapes. What the routes make of them: `test_completions`."""

import pytest

from api.answer_bodies import CompletionLogprobs
from api.generate import Prompt
from api.logprobs import CompletionLogprobsWriter
from api.output_processor import PositionLogprobs, TokenLogprob
from api.sampling import SamplingParams
from api.tokenizer import Tokenizer
from tests.helpers.tiny_tokenizers import BY_KIND, with_begin


def position(tokenizer: Tokenizer, token_id: int) -> PositionLogprobs:
    raw = tokenizer.token_bytes(token_id)
    return PositionLogprobs(TokenLogprob(token_id, raw.decode(), raw, -1.0, 1), [])


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "token ids"])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "sentencepiece_uncut", "unigram"])
def test_offsets_say_where_tokens_begin_in_the_text(kind: str, is_text: bool) -> None:
    """Although the begin token is not in it, nor the space that encoding put before a prompt."""
    tokenizer = Tokenizer(with_begin(BY_KIND[kind]()), {"bos_token": "<s>", "eos_token": "</s>"})
    given, answer = "The lazy dog", " jumps over"
    token_ids = tokenizer.encode(given)
    output_ids = tokenizer.encode(given + answer)[len(token_ids) :]
    prompt = Prompt(token_ids, [], given if is_text else tokenizer.decode(token_ids))
    writer, shape = CompletionLogprobsWriter(tokenizer, SamplingParams(), prompt), empty()

    writer.add_prompt(shape, [position(tokenizer, i) for i in token_ids[1:]])
    end = tokenizer.token_id("</s>") or 0
    writer.add(shape, [position(tokenizer, i) for i in [*output_ids, end]])

    text = given + answer
    assert (shape.tokens[0], shape.text_offset[:2]) == ("<s>", [0, 0])
    assert text.startswith(shape.tokens[1].removeprefix(" "))
    for token, offset in list(zip(shape.tokens, shape.text_offset, strict=True))[2:-1]:
        assert text[offset:].startswith(token)
    assert shape.text_offset[-1] == len(text)


def empty() -> CompletionLogprobs:
    return CompletionLogprobs([], [], [], [])


def test_special_tokens_that_the_prompt_writes_out_count() -> None:
    """They are in the echoed text, unlike those that encoding adds."""
    tokenizer = Tokenizer(with_begin(BY_KIND["byte_level"]()), {"bos_token": "<s>"})
    prompt = Prompt(tokenizer.encode("a<|turn|>b"), [], "a<|turn|>b")
    writer, shape = CompletionLogprobsWriter(tokenizer, SamplingParams(), prompt), empty()

    writer.add_prompt(shape, [position(tokenizer, i) for i in prompt.token_ids[1:]])

    assert shape.tokens == ["<s>", "a", "<|turn|>", "b"]
    assert shape.text_offset == [0, 0, 1, 9]
