"""Grammars of clients: Lark in llguidance's dialect, or the EBNF of llama.cpp and xgrammar. Pure.

They are told apart as vLLM does it: a rule with `::=` is EBNF.
"""

import re

from api.limits import MAX_EBNF_BYTES, MAX_GRAMMAR_BYTES
from engine.errors import InvalidRequestError

_COMMENT = re.compile(r"(?:#|//).*")
_NEXT_CHOICE = re.compile(r"\s*\n\s*\|")
_CODE_POINT = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


def read(text: str, place: str) -> str:
    """A grammar in Lark.

    Args:
        text: as the client gave it.
        place: its name in the request.

    Raises:
        InvalidRequestError: it is empty, too long, or EBNF that cannot be read.
    """
    if not text.strip():
        raise InvalidRequestError(f"{place} must not be empty", place)
    is_ebnf = len(text) <= MAX_GRAMMAR_BYTES and _is_ebnf(text)
    most = MAX_EBNF_BYTES if is_ebnf else MAX_GRAMMAR_BYTES
    if len(text.encode("utf-8", "replace")) > most:
        raise InvalidRequestError(f"{place} is over {most} bytes long", place)
    return _as_lark(text, place) if is_ebnf else text


def _is_ebnf(text: str) -> bool:
    return any("::=" in _COMMENT.sub("", line) for line in text.splitlines())


def _as_lark(text: str, place: str) -> str:
    # Few requests bring one: here and not at the top, so that few servers load the library.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        # The converter takes a line break before a bar for the end of the rule.
        lark: str = gbnf_to_lark(_CODE_POINT.sub(_plain, _NEXT_CHOICE.sub(" |", text)))
    except RecursionError as error:
        raise InvalidRequestError(f"{place}: the grammar is nested too deeply", place) from error
    except Exception as error:  # the converter raises whatever it runs into
        raise InvalidRequestError(f"{place} is no EBNF: {str(error)[:300]}", place) from error
    return lark


def _plain(match: re.Match[str]) -> str:
    """An escape by number as the character itself; the converter loses its leading zeros."""
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    is_character = code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
    return chr(code) if is_character else match[0]
