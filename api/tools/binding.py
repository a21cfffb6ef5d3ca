"""Calls that a grammar enforces: what the families' writers share. Pure.

A writer says how its family writes calls of some tools, as expressions of a grammar, so that the
family's scanner reads back exactly what the grammar allows.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from api.limits import MAX_BOUND_NAME_CHARS
from api.structured.keywords import Schema
from api.structured.lark import Grammar, one_of
from api.structured.schema import JsonStyle, with_style

NAME = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_BOUND_NAME_CHARS}}}")
"""Names that every family can write."""

ANY_ARGUMENTS: Schema = {"type": "object"}
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool that may be called."""

    name: str
    schema: Schema
    """Of its arguments: `structured.schema.checked` has let it pass."""

    style: JsonStyle
    """How exactly it holds."""

    def between(self, grammar: Grammar, before: str, after: str) -> str:
        """Its arguments as JSON, between two texts that may hold markers."""
        arguments = grammar.json(with_style(self.schema, self.style))
        return f"{grammar.marker(before)} {arguments} {grammar.marker(after)}"

    def as_json(self, grammar: Grammar, key: str) -> str:
        """A call as a JSON object, with its arguments under `key`."""
        return self.between(grammar, f'{{"name": "{self.name}", "{key}": ', "}")


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of calls."""

    start: str
    """The text that it begins with: where it appears, calls begin."""

    rest: str
    """An expression: all that follows."""

    separator: str | None = None
    """Between one block and the next; None: there is no next one."""

    sign: str | None = None
    """Where `start` is no marker: a pattern for it, with which a line has to begin."""


WriteCalls = Callable[[Grammar, Sequence[BoundTool], bool], Sequence[Block]]
"""Of the tools, calls of which any one may stand; the last argument: more than one call may."""


def calls_only(grammar: Grammar, blocks: Sequence[Block], *, many: bool) -> str:
    """An answer that is calls and nothing else.

    Args:
        grammar: takes the rules.
        blocks: any of these.
        many: more than one call.
    """
    block = grammar.rule(one_of(f"{grammar.marker(block.start)} {block.rest}" for block in blocks))
    separator = blocks[0].separator
    if not many or separator is None:
        return block
    return f"{block} ({grammar.marker(separator)} {block})*" if separator else f"{block}+"


def text_with_calls(grammar: Grammar, blocks: Sequence[Block], *, many: bool) -> str:
    """A text in which calls may stand."""
    heads = [f"{_head(grammar, block, blocks)} {block.rest}" for block in blocks]
    return f"{grammar.rule(one_of(heads))}{'*' if many else '?'} {_tail(grammar, blocks)}"


def _head(grammar: Grammar, block: Block, blocks: Sequence[Block]) -> str:
    """A text up to the beginning of calls, and that."""
    if block.sign is not None:
        return grammar.lazy(_LINE_START + block.sign)
    others = {other.start for other in blocks} - {block.start}
    return grammar.text_through(block.start, sorted(others))


def _tail(grammar: Grammar, blocks: Sequence[Block]) -> str:
    """A text in which no calls begin."""
    signs = [_LINE_START + block.sign for block in blocks if block.sign is not None]
    if signs:
        return grammar.text_unlike(signs)
    return grammar.text_without(sorted({block.start for block in blocks}))


_LINE_START = r"(?:[\s;]*|(?s:.*)\n[ \t]*)"
"""Behind a call, what stands between two of them begins a line too."""
