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
        if calls is not None and config.tool_call_parser != select.AUTO:
            _warn_of_calls(name, calls, template)
        if thoughts and config.reasoning_parser != reasoning.AUTO:
            _warn_of_thoughts(config.reasoning_parser, thoughts, tokenizer)
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


def _warn_of_calls(name: str, calls: Family, template: ChatTemplate) -> None:
    """Say what will happen where the flag and the chat template do not fit."""
    source = template.source
    if source is None:
        return  # there are no conversations at all
    if not template.reads_tools:
        logger.warning(
            "--tool-call-parser %s: the model's chat template shows no tools, so the model does not"
            " know what it may call: --chat-template takes one that does",
            name,
        )
    elif calls.starts and not any(start in source for start in calls.starts):
        logger.warning(
            "--tool-call-parser %s: the model's chat template never writes %s, so the model may"
            " call tools in another notation, which stays text: %s",
            name,
            " or ".join(calls.starts),
            _advice(source, name),
        )


def _advice(template: str, name: str) -> str:
    found = select.detect(template)
    if found is None or found == name:
        return "its model card says which parser it needs"
    return f"the template looks like {found}"


def _warn_of_thoughts(name: str | None, thoughts: ReasoningFamily, tokenizer: Tokenizer) -> None:
    """Say what will happen where the model may not know the markers."""
    needed = (thoughts.end,) if thoughts.is_always_open else (thoughts.start, thoughts.end)
    missing = [marker for marker in needed if not _added_tokens(tokenizer, (marker,))]
    if not missing:
        return
    logger.warning(
        "--reasoning-parser %s: %s no token of this model: unless it spells out %s, %s",
        name,
        " and ".join(missing) + (" is" if len(missing) == 1 else " are"),
        missing[0],
        "its thoughts do not end, and content is null"
        if missing[0] == thoughts.end
        else "what it thinks is content",
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
