"""What a request wants continued, within bounds. Refusals of single values: `test_bad_input`."""

import json
from typing import Any

import msgspec
import pytest

from api import prompts
from engine.errors import InvalidRequestError


def read(messages: list[Any]) -> list[dict[str, Any]]:
    return prompts.read_messages(msgspec.Raw(json.dumps(messages).encode()))


def test_keys_that_we_do_not_know_stay() -> None:
    """In messages and in parts: templates may know them."""
    part = {"type": "text", "text": "é\n", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": "x", "name": "s", "extra": [1, None, {"a": 2.5}]},
        {"role": "user", "content": [part]},
    ]

    assert read(messages) == messages
    assert read([{"role": "user", "content": [" x"]}]) == [
        {"role": "user", "content": [{"type": "text", "text": " x"}]}
    ]


def test_list_that_is_too_long_is_not_read_to_its_end() -> None:
    """What comes after the first value too many costs nothing: here it is not even JSON."""
    with pytest.raises(InvalidRequestError, match="at most length 4096"):
        prompts.read_messages(msgspec.Raw(b"[" + b"{}," * 4097 + b"~"))


def test_what_surrounds_the_texts_is_bounded_over_all_messages() -> None:
    """Texts may be as long as they like; a thousand messages of little junk are much junk."""
    long = {"role": "user", "content": [{"type": "text", "text": "x" * (1 << 20)}]}
    assert len(read([long] * 3)) == 3

    junk = {"role": "user", "content": "x", "junk": [[]] * 100}
    assert len(read([junk] * 10)) == 10
    with pytest.raises(InvalidRequestError, match="65536 bytes besides"):
        read([junk] * 1000)


def test_parts_are_counted_over_all_messages() -> None:
    """Two contents of 3000 parts are too many, although each alone is not."""
    message = {"role": "user", "content": ["x"] * 3000}
    assert len(read([message])[0]["content"]) == 3000

    with pytest.raises(InvalidRequestError, match="over 4096 parts"):
        read([message] * 2)
