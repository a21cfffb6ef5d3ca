"""What a prompt costs grows as its length does, whatever it is made of."""

import time
from collections.abc import Callable
from functools import partial

import pytest

from api.chat_template import ChatTemplate
from api.tokenizer import Tokenizer
from tests.helpers.tiny_tokenizers import BY_KIND, with_begin

SIZES = (1000, 2000, 4000, 8000)
MAX_RATIO = 2.6
"""Of the times for a length and for half of it: 2 and some noise, where a square would be 4."""

TEMPLATE = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
PIECES = ["<s>", "<|turn|>", "<|", "a", "\n", "é", "ab "]


def cost(call: Callable[[], object]) -> float:
    """Processor seconds, at best."""
    times = []
    for _ in range(5):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


@pytest.mark.row("S-30")
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "word_piece"])
@pytest.mark.parametrize("piece", PIECES, ids=repr)
def test_the_cost_of_a_prompt_is_linear(kind: str, piece: str) -> None:
    """As tokens, and in a conversation, where they are text: of special tokens, their
    beginnings, and what tokenizers make one long word of."""
    tokenizer = Tokenizer(with_begin(BY_KIND[kind]()), {"bos_token": "<s>", "eos_token": "</s>"})
    chat = ChatTemplate.load(tokenizer, TEMPLATE)

    def as_tokens(text: str) -> object:
        return tokenizer.encode(text, add_special_tokens=False)

    def as_chat(text: str) -> object:
        rendered = chat.render([{"role": "user", "content": text}])
        return tokenizer.encode(rendered, add_special_tokens=False)

    for use in (as_tokens, as_chat):
        # Neighbours slow a processor down as well, but not each time.
        assert any(growth(use, piece) < MAX_RATIO for _ in range(3)), use.__name__


def growth(use: Callable[[str], object], piece: str) -> float:
    """By how much the time grows when the length doubles."""
    times = [cost(partial(use, piece * size)) for size in SIZES]
    return float((times[-1] / times[0]) ** (1 / (len(SIZES) - 1)))
