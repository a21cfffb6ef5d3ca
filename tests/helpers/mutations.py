"""Bodies of requests with anything in any place, and what may come of them."""

import copy
from collections.abc import Iterator
from typing import Any

import httpx
from hypothesis import strategies as st

from api.errors import is_anthropic

VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e300, 2**63, "", "x", "\0", "é" * 300, "<think>", "</tool_call>"),
    *([], {}, [[]], [{}], [None], {"type": "text"}, {"type": "image"}, {"a": {"b": []}}),
]


@st.composite
def mutations(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """Of a body, up to three values are others, or missing."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(0, 3))):
        *way, last = draw(st.sampled_from(list(_places(body))))
        holder: Any = body
        for key in way:
            holder = holder[key]
        if draw(st.booleans()):
            holder[last] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        else:
            del holder[last]
    return body


def check_answer(response: httpx.Response) -> None:
    """An answer, or a refusal that has words in the shape of its API; never our failure."""
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        body = response.json()
        assert body["error"]["message"]
        if is_anthropic(response.request.url.path):
            assert body["type"] == "error"
        else:
            assert body["error"]["type"] == "invalid_request_error"


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a body."""
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield (*place, key)
        yield from _places(value[key], (*place, key))
