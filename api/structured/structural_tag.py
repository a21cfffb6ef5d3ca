"""Structural tags: text with parts that are bound. xgrammar's formats and vLLM's older form. Pure.

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": […], "tags": […]}}
    {"type": "structural_tag", "triggers": […], "structures": [{"begin", "schema", "end"}, …]}

Where a trigger appears in the text, one of the tags that begin with it has to follow. Markers are
texts here: a special token of that name is not meant by them.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from api.body import decode_field
from api.limits import MAX_REPEATS, MAX_TAG_BYTES, MAX_TAG_TEXT_CHARS, MAX_TAGS, MAX_TRIGGERS
from api.structured import ebnf, schema
from api.structured.keywords import check_pattern
from api.structured.lark import EMPTY, Grammar, TooLongError, literal, one_of, regex
from api.structured.schema import JsonStyle
from engine.errors import InvalidRequestError, UnsupportedFieldError
from engine.structured_output import StructuredOutput

NAMES = ("type", "format", "structures", "triggers")
"""What such a tag may hold, in either form."""

_ANYTHING = msgspec.json.Decoder(dict[str, Any]).decode


def read(raw: bytes | msgspec.Raw, place: str, style: JsonStyle) -> StructuredOutput:
    """The grammar of a structural tag.

    Args:
        raw: its JSON.
        place: its name in the request.
        style: of JSON in it.

    Raises:
        InvalidRequestError: it is malformed or too large.
        UnsupportedFieldError: it holds a format that is not served.
    """
    if not bytes(raw).strip():
        raise InvalidRequestError(f"{place} must not be empty", place)
    if len(raw) > MAX_TAG_BYTES:
        raise InvalidRequestError(f"{place} is over {MAX_TAG_BYTES} bytes long", place)
    schema.check_depth(bytes(raw), place)
    tag = decode_field(_ANYTHING, raw, place)
    try:
        return _written(tag, place, style)
    except TooLongError as error:
        raise InvalidRequestError(f"{place} makes too long a grammar", place) from error


def _written(tag: dict[str, Any], place: str, style: JsonStyle) -> StructuredOutput:
    writer = _Writer(style)
    if "format" in tag:
        start = writer.format(tag["format"], f"{place}.format")
    elif "structures" in tag:
        start = writer.older(tag, place)
    else:
        raise InvalidRequestError(f"{place} must hold format, or structures and triggers", place)
    return writer.grammar.output(start)


class _Writer:
    """Writes the rules of one structural tag."""

    def __init__(self, style: JsonStyle) -> None:
        self.grammar = Grammar()
        self._style = style

    def older(self, tag: dict[str, Any], place: str) -> str:
        structures = _list(tag, "structures", place)
        triggers = [_checked(text, f"{place}.triggers[{i}]") for i, text in _texts(tag, place)]
        tags = []
        for i, structure in enumerate(structures):
            where = f"{place}.structures[{i}]"
            begin, end = _text(structure, "begin", where), _text(structure, "end", where)
            body = self._json(structure.get("schema"), f"{where}.schema")
            tags.append((begin, f"{body} {literal(end)}"))
        return self._triggered(triggers, tags, place)

    def format(self, form: object, place: str) -> str:
        """The expression of a format."""
        if not isinstance(form, dict):
            raise InvalidRequestError(f"{place} must be an object with a type", place)
        match form.get("type"):
            case "const_string":
                return literal(_text(form, "value", place))
            case "json_schema":
                if form.get("style", "json") != "json":
                    raise UnsupportedFieldError(
                        f"{place}.style: only json is supported", f"{place}.style"
                    )
                return self._json(form.get("json_schema"), f"{place}.json_schema")
            case "regex":
                pattern = _text(form, "pattern", place)
                check_pattern(pattern, f"{place}.pattern")
                return regex(pattern)
            case "grammar":
                text = ebnf.read(_text(form, "grammar", place, most=None), f"{place}.grammar")
                return self.grammar.embedded(StructuredOutput("lark", text))
            case "any_text":
                return self.grammar.text_without(_excludes(form, place))
            case "sequence":
                return " ".join(self._elements(form, place))
            case "or":
                return one_of(self._elements(form, place))
            case "tag":
                begin, rest = self._tag(form, place)
                return f"{literal(begin)} {rest}"
            case "optional" | "plus" | "star" | "repeat" as kind:
                content = self.format(form.get("content"), f"{place}.content")
                return self.grammar.rule(f"({content}){_repeats(kind, form, place)}")
            case "triggered_tags":
                return self._triggered_tags(form, place)
            case "tags_with_separator":
                return self._separated_tags(form, place)
            case kind:
                raise UnsupportedFieldError(
                    f"{place}.type: {str(kind)[:40]!r} is not supported", f"{place}.type"
                )

    def _elements(self, form: dict[str, Any], place: str) -> list[str]:
        elements = _list(form, "elements", place)
        return [
            self.grammar.rule(self.format(element, f"{place}.elements[{i}]"))
            for i, element in enumerate(elements)
        ]

    def _tag(self, form: object, place: str) -> tuple[str, str]:
        """How a tag begins, and the expression of the rest."""
        if not isinstance(form, dict):
            raise InvalidRequestError(f"{place} must be a tag", place)
        begin = _text(form, "begin", place)
        ends = form.get("end", "")
        listed = ends if isinstance(ends, list) else [ends]
        ends = [_checked(end, f"{place}.end") for end in listed]
        content = form.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends) and ends:
            forbidden = _excludes(content, f"{place}.content")
            bodies = [self.grammar.text_through(end, forbidden) for end in ends]
            return begin, one_of(bodies)
        body = self.format(content, f"{place}.content")
        return begin, f"{body} {one_of(map(literal, ends))}"

    def _tags(self, form: dict[str, Any], place: str) -> list[tuple[str, str]]:
        return [
            self._tag(tag, f"{place}.tags[{i}]") for i, tag in enumerate(_list(form, "tags", place))
        ]

    def _triggered_tags(self, form: dict[str, Any], place: str) -> str:
        return self._triggered(
            [_checked(text, f"{place}.triggers[{i}]") for i, text in _texts(form, place)],
            self._tags(form, place),
            place,
            is_one=bool(form.get("stop_after_first")),
            needs_one=bool(form.get("at_least_one")),
            excludes=_excludes(form, place),
        )

    def _separated_tags(self, form: dict[str, Any], place: str) -> str:
        tags = [f"{literal(begin)} {rest}" for begin, rest in self._tags(form, place)]
        tag = self.grammar.rule(one_of(tags))
        separator = literal(_text(form, "separator", place))
        more = "" if form.get("stop_after_first") else f"({separator} {tag})*"
        return f"{tag} {more}" if form.get("at_least_one") else f"({tag} {more})?"

    def _triggered(
        self,
        triggers: Sequence[str],
        tags: Sequence[tuple[str, str]],
        place: str,
        *,
        is_one: bool = False,
        needs_one: bool = False,
        excludes: Sequence[str] = (),
    ) -> str:
        """Text in which tags stand, each behind its trigger."""
        blocks = []
        for trigger in triggers:
            # What begins with the trigger; another one may begin with this one.
            bodies = [
                f"{literal(begin[len(trigger) :])} {rest}"
                for begin, rest in tags
                if begin.startswith(trigger)
            ]
            if bodies:
                head = self.grammar.text_through(trigger, excludes)
                blocks.append(f"{head} {one_of(bodies)}")
        for begin, _ in tags:
            if not any(begin.startswith(trigger) for trigger in triggers):
                raise InvalidRequestError(
                    f"{place}: no trigger is the beginning of {begin[:80]!r}", place
                )
        block = self.grammar.rule(one_of(blocks))
        number = ("" if needs_one else "?") if is_one else ("+" if needs_one else "*")
        tail = EMPTY if is_one and needs_one else self.grammar.text_without([*triggers, *excludes])
        return f"{block}{number} {tail}"

    def _json(self, value: object, place: str) -> str:
        if not isinstance(value, dict | bool):
            raise InvalidRequestError(f"{place} must be a schema", place)
        checked = schema.checked(value, place, self._style)
        return self.grammar.json(schema.with_style(checked, self._style))


def _repeats(kind: str, form: dict[str, Any], place: str) -> str:
    if kind != "repeat":
        return {"optional": "?", "plus": "+", "star": "*"}[kind]
    least, most = form.get("min", 0), form.get("max", MAX_REPEATS)
    for name, value in (("min", least), ("max", most)):
        if type(value) is not int or not 0 <= value <= MAX_REPEATS:
            at = f"{place}.{name}"
            raise InvalidRequestError(f"{at} must be from 0 to {MAX_REPEATS}", at)
    return f"{{{least},{most}}}"


def _list(form: dict[str, Any], name: str, place: str, most: int = MAX_TAGS) -> list[Any]:
    value = form.get(name)
    at = f"{place}.{name}"
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise InvalidRequestError(f"{at} must be a list of 1 to {most}", at)
    return value


def _texts(form: dict[str, Any], place: str) -> list[tuple[int, object]]:
    triggers = _list(form, "triggers", place, MAX_TRIGGERS)
    if not all(triggers):
        raise InvalidRequestError(f"{place}.triggers must not be empty", f"{place}.triggers")
    return list(enumerate(triggers))


def _excludes(form: dict[str, Any], place: str) -> list[str]:
    excludes = form.get("excludes") or []
    if not isinstance(excludes, list) or len(excludes) > MAX_TRIGGERS or not all(excludes):
        at = f"{place}.excludes"
        raise InvalidRequestError(f"{at} must be a list of at most {MAX_TRIGGERS} texts", at)
    return [_checked(text, f"{place}.excludes[{i}]") for i, text in enumerate(excludes)]


def _text(form: object, name: str, place: str, *, most: int | None = MAX_TAG_TEXT_CHARS) -> str:
    value = form.get(name) if isinstance(form, dict) else None
    return _checked(value, f"{place}.{name}", most=most)


def _checked(value: object, place: str, *, most: int | None = MAX_TAG_TEXT_CHARS) -> str:
    if not isinstance(value, str) or (most is not None and len(value) > most):
        raise InvalidRequestError(f"{place} must be a text of at most {most} characters", place)
    return value
