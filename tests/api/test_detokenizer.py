"""Tokens to text as they arrive, next to decoding everything at once."""

import random
import time
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api import detokenizer
from api.tokenizer import Tokenizer
from tests.helpers.tiny_tokenizers import BY_KIND

_KINDS = st.sampled_from(sorted(BY_KIND))
# Numbers that every vocabulary has, some that none has, and some special tokens.
_IDS = st.lists(st.integers(0, 510), max_size=24)


@lru_cache
def make(kind: str) -> Tokenizer:
    return Tokenizer(BY_KIND[kind](), {"bos_token": "<s>", "eos_token": "</s>"})


def library_decode(tokenizer: Tokenizer, token_ids: list[int], skips: bool) -> str:
    text: str = tokenizer._backend.decode(token_ids, skip_special_tokens=skips)
    return text


def arrive(tokenizer: Tokenizer, token_ids: list[int], skips: bool, num_prompt: int = 0) -> str:
    """The text that comes out when tokens after the prompt arrive one by one."""
    stream = detokenizer.start(tokenizer, token_ids[:num_prompt], skip_special_tokens=skips)
    return "".join(stream.push([i]) for i in token_ids[num_prompt:]) + stream.finish()


def is_byte(tokenizer: Tokenizer, token_id: int) -> bool:
    return (tokenizer._backend.id_to_token(token_id) or "").startswith("<0x")


@settings(max_examples=400, deadline=None, database=None)
@given(_KINDS, _IDS, st.booleans())
def test_pieces_are_the_whole_text(kind: str, token_ids: list[int], skips: bool) -> None:
    """For any tokens in any order, of every kind of tokenizer; and as the library decodes them."""
    tokenizer = make(kind)

    text = arrive(tokenizer, token_ids, skips)

    assert text == tokenizer.decode(token_ids, skip_special_tokens=skips)
    # The library turns a whole run of byte tokens into U+FFFD if any part of it is broken.
    if not any(is_byte(tokenizer, i) for i in token_ids):
        assert text == library_decode(tokenizer, token_ids, skips)


@settings(max_examples=250, deadline=None, database=None)
@given(_KINDS, st.text(max_size=30), st.booleans())
def test_any_text_comes_back_as_the_library_has_it(kind: str, text: str, skips: bool) -> None:
    """Emoji and CJK of several tokens too, and byte tokens: valid text is never touched."""
    tokenizer = make(kind)
    token_ids = tokenizer.encode(text)

    assert arrive(tokenizer, token_ids, skips) == library_decode(tokenizer, token_ids, skips)


@settings(max_examples=250, deadline=None, database=None)
@given(_KINDS, _IDS, st.data(), st.booleans())
def test_an_output_goes_on_where_its_prompt_ended(
    kind: str, token_ids: list[int], data: st.DataObject, skips: bool
) -> None:
    """Text of prompt and output is the text of both together: no space is cut or doubled."""
    tokenizer = make(kind)
    num_prompt = data.draw(st.integers(0, len(token_ids)))
    prompt = tokenizer.decode(token_ids[:num_prompt], skip_special_tokens=skips)

    text = arrive(tokenizer, token_ids, skips, num_prompt)

    if not prompt.endswith("\ufffd"):
        assert prompt + text == tokenizer.decode(token_ids, skip_special_tokens=skips)


def test_a_space_at_the_start_is_cut_only_at_the_start() -> None:
    """SentencePiece puts a space before every text; a continuation keeps its own."""
    tokenizer = make("sentencepiece")
    token_ids = tokenizer.encode("the dog", add_special_tokens=False)

    assert arrive(tokenizer, token_ids, skips=True) == "the dog"
    prompt = tokenizer.encode("over", add_special_tokens=True)
    assert arrive(tokenizer, prompt + token_ids, True, len(prompt)) == " the dog"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_leaves_when_it_is_whole(kind: str) -> None:
    """Not in parts, and not later than with its last byte."""
    tokenizer = make(kind)
    token_ids = tokenizer.encode("x漢🙂", add_special_tokens=False)
    stream = detokenizer.start(tokenizer)

    pieces = [stream.push([token_id]) for token_id in token_ids]

    assert [piece for piece in pieces if piece] == ["x", "漢", "🙂"]
    assert pieces[-1] == "🙂"
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_that_is_never_finished_is_one_mark(kind: str) -> None:
    """At the end of the text, and also where another token comes instead of its bytes."""
    tokenizer = make(kind)
    half = tokenizer.encode("漢", add_special_tokens=False)[-3:-1]
    word = tokenizer.encode("dog", add_special_tokens=False)[-1:]

    assert arrive(tokenizer, half, skips=True) == "\ufffd"
    assert arrive(tokenizer, half + word, skips=True).startswith("\ufffd")
    assert arrive(tokenizer, half + word, skips=True).count("\ufffd") == 1


def test_an_output_may_finish_a_character_of_its_prompt() -> None:
    """A prompt of token ids can end anywhere."""
    tokenizer = make("byte_level")
    token_ids = tokenizer.encode("a漢", add_special_tokens=False)

    assert arrive(tokenizer, token_ids, True, len(token_ids) - 1) == "漢"


def test_valid_characters_survive_broken_ones() -> None:
    """In a run of byte tokens only the broken byte is lost."""
    tokenizer = make("sentencepiece")
    run = [*tokenizer.encode("漢", add_special_tokens=False)[-3:]]
    broken = tokenizer.token_id("<0xFF>")
    assert broken is not None

    assert arrive(tokenizer, [*run, broken, *run], skips=True) == "漢\ufffd漢"


def test_special_tokens_show_when_asked_for() -> None:
    """Joined without a space if that is wanted, where the vocabulary joins by spaces."""
    tokenizer = make("word_piece")
    bos, eos = (tokenizer.token_id(t) or 0 for t in ("<s>", "</s>"))
    word = tokenizer.encode("dog", add_special_tokens=False)[:1]
    for spaces, expected in ((True, "<s> </s> d"), (False, "<s></s> d")):
        stream = detokenizer.start(
            tokenizer, skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        assert stream.push([bos, eos, *word]).startswith(expected)
    assert arrive(tokenizer, [bos, *word], skips=True).startswith("d")


def test_lone_surrogates_never_leave() -> None:
    """Bytes that would be one are broken UTF-8: every piece can be sent as it is."""
    tokenizer = make("sentencepiece")
    token_ids = [tokenizer.token_id(f"<0x{b:02X}>") or 0 for b in b"\xed\xa0\xbd\xed\xb8\x80"]
    stream = detokenizer.start(tokenizer)

    for token_id in token_ids:
        stream.push([token_id]).encode("utf-8")


@pytest.mark.parametrize("kind", sorted(BY_KIND))
def test_a_token_costs_the_same_however_long_the_text(kind: str) -> None:
    """Flat up to 50,000 tokens, also for tokens that never make a whole character."""
    tokenizer = make(kind)
    numbers = random.Random(0)
    stream = detokenizer.start(tokenizer)

    def seconds(count: int) -> float:
        token_ids = [numbers.randrange(tokenizer.vocab_size) for _ in range(count)]
        began = time.process_time()
        for token_id in token_ids:
            stream.push([token_id])
        return time.process_time() - began

    count = 25_000 if tokenizer.rule is not None else 2_500
    assert min(seconds(count // 5) for _ in range(5)) < 3 * seconds(count // 5)
