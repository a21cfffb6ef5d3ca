"""Grammars in llguidance's dialect of Lark, put together from expressions. Pure.

An expression is what may stand on the right of a rule. What Lark allows in a rule of its own only
(terminals, lazy texts, schemas, grammars of others) `Grammar` writes as one, and gives its name.

Texts and special tokens are two worlds there: no expression for text matches a special token, and
`<[id]>` matches that one token, special or not.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.limits import MAX_SPEC_BYTES
from engine.structured_output import StructuredOutput

_ANY_TEXT = "(?s:.*)"
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_<>\"'=:,;!@%`")
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

EMPTY = '""'


class TooLongError(Exception):
    """The grammar has more rules than can be sent."""


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def one_of(expressions: Iterable[str]) -> str:
    """Any one of them."""
    listed = list(dict.fromkeys(expressions))
    return listed[0] if len(listed) == 1 else f"({' | '.join(listed)})"


def escaped(text: str) -> str:
    """A text as a regular expression (Rust's syntax), for use between slashes."""
    return "".join(_CONTROLS.get(c) or (c if c in _PLAIN or c > "\x7f" else f"\\{c}") for c in text)


def regex(expression: str) -> str:
    """A regular expression between slashes."""
    pieces: list[str] = []
    is_escape = False
    for char in expression:
        if char in "\r\n" or (char == "/" and not is_escape):
            # After a backslash a line break stands for itself, as it does without one.
            pieces.append({"\n": "n" if is_escape else "\\n", "/": "\\/"}.get(char, "\\r"))
        else:
            pieces.append(char)
        is_escape = char == "\\" and not is_escape
    return f"/{''.join(pieces)}/"


class Grammar:
    """The rules of one grammar. Any method raises TooLongError where they become too many.

    Args:
        tokens: ids of tokens that markers are made of, by their texts. Such a token is always
            written as itself, since a tokenizer may keep it apart from texts.
    """

    def __init__(self, tokens: Mapping[str, int] | None = None) -> None:
        self._tokens = tokens or {}
        self._rules: list[str] = []
        self._num_chars = 0
        self._known: dict[str, str] = {}

    def rule(self, body: str, attributes: str = "") -> str:
        """Name an expression."""
        return self._add("r", body, attributes)

    def terminal(self, body: str) -> str:
        """Name an expression of texts and regular expressions: a single lexeme."""
        return self._add("T", body)

    def later(self) -> str:
        """The name of a rule that is written with `define`: it may refer to itself."""
        self._rules.append("")
        return f"r{len(self._rules) - 1}"

    def define(self, name: str, body: str) -> None:
        """Write a rule that was announced."""
        self._rules[int(name[1:])] = f"{name}: {body}"
        self._count(body)

    def marker(self, text: str) -> str:
        """A text that holds markers, or is one: the tokens in it as such."""
        for name in sorted(self._tokens, key=len, reverse=True):
            before, found, after = text.partition(name)
            if found:
                pieces = [self.marker(before), f"<[{self._tokens[name]}]>", self.marker(after)]
                return " ".join(piece for piece in pieces if piece)
        return literal(text) if text else ""

    def is_token(self, text: str) -> bool:
        """Whether a marker begins with a token of its own."""
        return any(text.startswith(name) for name in self._tokens)

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """JSON that is valid under a schema."""
        return self.rule(f"%json {_as_object(schema)}")

    def text_without(self, forbidden: Sequence[str]) -> str:
        """Any text that holds none of these."""
        return self.terminal(f"/{_ANY_TEXT}/" + "".join(map(_without, forbidden)))

    def text_unlike(self, patterns: Sequence[str]) -> str:
        """Any text of which no beginning matches one of these, which are written for Lark."""
        without = "".join(f" & ~/{pattern}{_ANY_TEXT}/" for pattern in patterns)
        return self.terminal(f"/{_ANY_TEXT}/{without}")

    def text_through(self, end: str, forbidden: Sequence[str] = ()) -> str:
        """Any text up to a marker, and the marker. It holds none of the forbidden texts."""
        if self.is_token(end):
            # Spelled out in other tokens, the marker would read the same.
            return f"{self.text_without((end, *forbidden))} {self.marker(end)}"
        return self.lazy(f"{_ANY_TEXT}{escaped(end)}", forbidden)

    def lazy(self, expression: str, forbidden: Sequence[str] = ()) -> str:
        """The shortest text that matches a regular expression, which is written for Lark."""
        terminal = self.terminal(f"/{expression}/" + "".join(map(_without, forbidden)))
        return self.rule(terminal, "[lazy]")

    def embedded(self, output: StructuredOutput) -> str:
        """What a description of any kind describes."""
        match output.kind:
            case "json_schema":
                return self.rule(f"%json {output.spec}")
            case "regex":
                return regex(output.spec)
            case "choice":
                return self.rule(one_of(map(literal, json.loads(output.spec))))
            case "lark":
                return self.rule(f"%lark {{\n{output.spec}\n}}")

    def render(self, start: str) -> str:
        """The whole text, for the kind `lark`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])

    def output(self, start: str) -> StructuredOutput:
        """The whole, as it crosses the wire."""
        text = self.render(start)
        if len(text.encode("utf-8", "replace")) > MAX_SPEC_BYTES:
            raise TooLongError
        return StructuredOutput("lark", text)

    def _add(self, prefix: str, body: str, attributes: str = "") -> str:
        key = f"{prefix}{attributes}: {body}"
        if key not in self._known:
            name = f"{prefix}{len(self._rules)}"
            self._rules.append(f"{name}{attributes}: {body}")
            self._known[key] = name
            self._count(body)
        return self._known[key]

    def _count(self, body: str) -> None:
        # While it grows: what a few kilobytes can ask for may be megabytes.
        self._num_chars += len(body)
        if self._num_chars > MAX_SPEC_BYTES:
            raise TooLongError


def _without(text: str) -> str:
    return f" & ~/{_ANY_TEXT}{escaped(text)}{_ANY_TEXT}/"


def _as_object(schema: Mapping[str, Any] | bool) -> str:
    # `%json` is followed by an object.
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
