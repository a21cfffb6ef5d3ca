"""How one model marks tool calls and thoughts in its answers. Made when a model is loaded."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from api import reasoning
from api.chat_template import ChatTemplate
from api.config import ApiConfig
from api.reasoning import ReasoningFamily
from api.tokenizer import Tokenizer
from api.tools import select
from api.tools.select import Family

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Markup:
    """The families of a model."""

    calls: Family | None
    """None: nobody knows how it calls tools."""

    thoughts: ReasoningFamily | None
    """None: its thoughts are not told from the rest."""

    call_token_ids: frozenset[int]
    """Markers of calls that are special tokens, and so would not show in the text."""

    thought_token_ids: frozenset[int]
    """The same of thoughts."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of their own, special or not, that markers are or hold: a grammar names them."""

    @classmethod
    def choose(cls, config: ApiConfig, tokenizer: Tokenizer, template: ChatTemplate) -> "Markup":
        """By the flags, or by the model's template."""
        found = config.tool_call_parser and select.choose(config.tool_call_parser, template.source)
        name, calls = found or ("none", None)
        thoughts = config.reasoning_parser and reasoning.choose(
            config.reasoning_parser, template.source
        )
        logger.info(
            "answers tool_call_parser=%s reasoning_parser=%s",
            name,
            f"{thoughts.start}…{thoughts.end}" if thoughts else "none",
        )
        return cls(
            calls,
            thoughts or None,
            _special_ids(tokenizer, calls.markers if calls else ()),
            _special_ids(tokenizer, (thoughts.start, thoughts.end) if thoughts else ()),
            _added_tokens(
                tokenizer,
                (
                    *(calls.markers if calls else ()),
                    *((thoughts.start, thoughts.end) if thoughts else ()),
                ),
            ),
        )


def _added_tokens(tokenizer: Tokenizer, markers: Sequence[str]) -> dict[str, int]:
    """Added tokens that are, or are in, one of the markers."""
    names = {tokenizer.token_name(token_id): token_id for token_id in tokenizer.added_token_ids}
    return {
        name: token_id
        for name, token_id in names.items()
        if name and not name.isalnum() and any(name in marker for marker in markers)
    }


def _special_ids(tokenizer: Tokenizer, markers: Iterable[str]) -> frozenset[int]:
    ids = {tokenizer.token_id(marker) for marker in markers}
    return frozenset(i for i in ids if i in tokenizer.special_token_ids)
