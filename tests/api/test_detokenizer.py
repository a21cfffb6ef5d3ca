"""Tokens to text as they arrive, next to decoding everything at once."""

import itertools
from collections.abc import Iterable
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api import detokenizer
from api.tokenizer import Tokenizer
from tests.helpers.counted_calls import counted_calls
from tests.helpers.tiny_tokenizers import BY_KIND

_KINDS = st.sampled_from(sorted(BY_KIND))
# Numbers that every vocabulary has, some that none has, and some special tokens.
_IDS = st.lists(st.integers(0, 510), max_size=24)
_CHARACTERS = [
    "👩\u200d👩\u200d👧\u200d👦",  # four people and what joins them
    "👍🏽🇩🇪🏴\U000e0067\U000e0062\U000e007f",  # colours and flags
    "漢字かな交じり文、한국어。",
    "e\u0301 ç ﷽ नमस्ते ไทย",
    "\U0010ffff\x7f\x00\u2028",
]


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


@settings(max_examples=400)
@given(_KINDS, _IDS, st.booleans(), st.data())
def test_pieces_are_the_whole_text(
    kind: str, token_ids: list[int], skips: bool, data: st.DataObject
) -> None:
    """For any tokens in any order, however many come at a time, of every kind of tokenizer; and as
    the library decodes them."""
    tokenizer = make(kind)
    cut = data.draw(st.integers(0, len(token_ids)))
    stream = detokenizer.start(tokenizer, skip_special_tokens=skips)

    text = stream.push(token_ids[:cut]) + stream.push(token_ids[cut:]) + stream.finish()

    assert text == arrive(tokenizer, token_ids, skips)
    assert text == tokenizer.decode(token_ids, skip_special_tokens=skips)
    # The library turns a whole run of byte tokens into U+FFFD if any part of it is broken.
    if "\ufffd" not in text or "sentencepiece" not in kind:
        assert text == library_decode(tokenizer, token_ids, skips)


@settings(max_examples=250)
@given(_KINDS, st.text(max_size=30), st.booleans())
def test_any_text_comes_back_as_the_library_has_it(kind: str, text: str, skips: bool) -> None:
    """Emoji and CJK of several tokens too, and byte tokens: valid text is never touched."""
    tokenizer = make(kind)
    token_ids = tokenizer.encode(text)

    assert arrive(tokenizer, token_ids, skips) == library_decode(tokenizer, token_ids, skips)


@settings(max_examples=250)
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


@pytest.mark.parametrize("text", _CHARACTERS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "sentencepiece_uncut"])
def test_characters_of_several_tokens_come_whole(kind: str, text: str) -> None:
    """Emoji, their joiners and flags, CJK, marks: each piece is characters of the text."""
    tokenizer = make(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    stream = detokenizer.start(tokenizer)

    pieces = [stream.push([token_id]) for token_id in token_ids]

    assert "".join(pieces) == text
    assert stream.finish() == ""
    assert len(token_ids) > len([piece for piece in pieces if piece])


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

    pieces = [stream.push([token_id]) for token_id in token_ids]

    assert "".join(pieces).encode("utf-8").decode().strip("\ufffd") == ""


@settings(max_examples=150)
@given(_KINDS, _IDS)
def test_added_tokens_are_joined_without_spaces_on_request(kind: str, token_ids: list[int]) -> None:
    """And nothing else changes: only a space between two of them may go."""
    tokenizer = make(kind)
    named = [i for i in token_ids if tokenizer.token_name(i) is not None]
    expected = ""
    for place, token_id in enumerate(named):
        earlier = named[max(0, place - 6) : place]
        whole = library_decode(tokenizer, [*earlier, token_id], skips=False)
        new = whole[len(library_decode(tokenizer, earlier, skips=False)) :]
        is_joined = {token_id, *earlier[-1:]} <= tokenizer.added_token_ids and bool(earlier)
        expected += new.removeprefix(" ") if is_joined else new

    stream = detokenizer.start(
        tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False
    )
    text = stream.push(token_ids) + stream.finish()

    if "\ufffd" not in text and "word" in kind:
        assert text == expected
    elif "word" not in kind:
        assert text == arrive(tokenizer, token_ids, skips=False)


class CountingTokenizer(Tokenizer):
    """Counts the tokens that it decodes."""

    num_decoded = 0

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        token_ids = list(token_ids)
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        self.num_decoded += 1
        return super().token_bytes(token_id)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "unigram", "word_piece"])
@pytest.mark.parametrize("has_characters", [True, False])
def test_the_fifty_thousandth_token_costs_what_the_first_does(
    kind: str, has_characters: bool
) -> None:
    """In calls, and in tokens that are read: also where bytes never make a whole character."""
    tokenizer = CountingTokenizer(BY_KIND[kind](), {})
    text = "the quick brown fox, 漢 naïve " if has_characters else "\U0001f642"
    cycle = itertools.cycle(tokenizer.encode(text, add_special_tokens=False)[: -1 + has_characters])
    stream = detokenizer.start(tokenizer)
    stream.push(itertools.islice(cycle, 200))  # what is looked up once

    def cost(count: int) -> tuple[float, float]:
        tokenizer.num_decoded = 0
        token_ids = list(itertools.islice(cycle, count))
        with counted_calls() as calls:
            for token_id in token_ids:
                stream.push([token_id])
        return calls.count / count, tokenizer.num_decoded / count

    first = cost(1_000)
    is_quick = tokenizer.rule is not None
    cost(48_000 if is_quick else 8_000)
    assert cost(1_000) == pytest.approx(first, rel=0.1)
    assert first[1] <= (1 if is_quick else 30)
