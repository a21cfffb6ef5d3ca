"""Every field of every body, attacked by its type: numbers that are none, too large or out of
bounds, lists that are long or hold the wrong things, texts that no one can use.

The fields are found in the structs that the routes declare, so a new one is attacked as well. The
example of the route is the request around it.
"""

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from api.app import all_routes
from api.config import ApiConfig
from api.engine_client import EngineClient
from api.errors import is_anthropic
from api.routing import Route
from api.service import Service
from tests.helpers.http_server import HttpServer, serving
from tests.helpers.processor_time import within

MAX_S = 0.2
"""Of processor time, from request to refusal."""

LONG = "9" * 400

# As they stand in the body: Python could not write some of them.
NO_NUMBERS = ["true", '"1"', "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "[]", "{}"]
NO_INTS = [*NO_NUMBERS, "1.5", "1e400"]
NO_TEXTS = ["7", "true", "[7]", "[[]]", "{}", "NaN", r'"\ud800"']
NO_BOOLS = ["1", '"true"', "[]", "{}", "NaN"]
NO_LISTS = ['"x"', "7", "true", "NaN", '{"a": 1}']
EDGES = {
    int: [
        "-1",
        "0",
        LONG,
        f"-{LONG}",
        *(str(2**bits - less) for bits in (31, 32, 63, 64) for less in (0, 1)),
    ],
    float: ["-0.0", "1e-300", "-1", "1e300"],
}
"""Out of bounds for some fields, and fine for others."""


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving() as server:
        yield server
        assert server.complete(prompt="ok").json()["choices"][0]["text"] == "ok"


def _routes() -> list[Route]:
    """One for each kind of body."""
    service = Service(ApiConfig(served_model_names=("m",)), EngineClient(1))
    service.close()
    routes = reversed(all_routes(service))  # the first of each kind stays
    return list({route.body: route for route in routes if route.body is not None}.values())[::-1]


def _kinds(annotation: Any) -> set[Any]:
    """The members of a union, None and UNSET aside."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    return set(members) - {types.NoneType, msgspec.UnsetType}


def _fields(struct: type[msgspec.Struct]) -> Iterator[tuple[str, set[Any]]]:
    for field in msgspec.structs.fields(struct):
        yield field.encode_name, _kinds(field.type)


def _wrong(kinds: set[Any]) -> list[str]:
    """Values of no type that the field has."""
    if len(kinds) != 1:
        return ["true", "NaN"] if bool not in kinds else ["NaN"]
    (kind,) = kinds
    if kind is int:
        return NO_INTS
    if kind is float:
        return NO_NUMBERS
    if kind is bool:
        return NO_BOOLS
    if kind is str:
        return NO_TEXTS
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        return [*NO_LISTS, *(f"[{value}]" for value in _wrong(_kinds(item)))]
    return ["NaN"]


def _strange(kinds: set[Any]) -> list[str]:
    """Values that a field may or may not take; either is no failure of ours."""
    values = [edge for kind in kinds for edge in EDGES.get(kind, [])]
    if str in kinds:
        values += ['""', r'"\u0000"', '"\u2028"', json.dumps("x" * 100_000)]
    for kind in kinds:
        if typing.get_origin(kind) is list:
            (item,) = typing.get_args(kind)
            values += ["[]", *(f"[{value}]" for value in _strange(_kinds(item)))]
            values.append(f"[{','.join([*_strange(_kinds(item)), '0'][:1] * 100_000)}]")
    return values


CASES = [
    pytest.param(route, name, kinds, id=f"{route.path} {name}")
    for route in _routes()
    if route.body is not None
    for name, kinds in _fields(route.body)
    if msgspec.Raw not in kinds
]


def _body(route: Route, name: str, value: str) -> bytes:
    fields = {key: json.dumps(each) for key, each in (route.example or {}).items()}
    fields.pop("stream", None)
    fields[name] = value
    return f"{{{', '.join(f'{json.dumps(k)}: {v}' for k, v in fields.items())}}}".encode()


def _send(server: HttpServer, route: Route, name: str, value: str) -> tuple[int, dict[str, Any]]:
    """Status and error, which are quickly there: the example is short."""
    headers = {"content-type": "application/json"}
    content = _body(route, name, value)
    response = within(MAX_S, lambda: server.http.post(route.path, content=content, headers=headers))
    assert response.status_code < 500, (value[:50], response.text)
    if response.status_code == 200:
        return 200, {}
    for secret in ("Traceback", " at 0x", "/tmp", ".py", "127.0.0.1"):
        assert secret not in response.text
    error = json.loads(response.content, parse_constant=pytest.fail)  # NaN is no JSON for us either
    return response.status_code, error["error"]


def _names(error: dict[str, Any], route: Route, name: str) -> bool:
    """Whether it says which field is meant: Anthropic's errors do so in their message."""
    if is_anthropic(route.path):
        return name in error["message"]
    return str(error["param"]).startswith(name)


@pytest.mark.row("S-15", "S-53", "F-36")
@pytest.mark.parametrize(("route", "name", "kinds"), CASES)
def test_a_value_of_the_wrong_type_is_refused_by_name(
    server: HttpServer, route: Route, name: str, kinds: set[Any]
) -> None:
    """400, the field's name, at once."""
    for value in _wrong(kinds):
        status, error = _send(server, route, name, value)
        assert status == 400, value[:50]
        # A surrogate without its partner is not even a text: the whole body is no JSON.
        assert _names(error, route, name) or "ud800" in value, (value[:50], error)


@pytest.mark.row("S-15", "F-36")
@pytest.mark.parametrize(("route", "name", "kinds"), CASES)
def test_a_value_at_or_beyond_an_edge_harms_nobody(
    server: HttpServer, route: Route, name: str, kinds: set[Any]
) -> None:
    """An answer, or a 400 with the field's name: never our failure, never a wait."""
    for value in _strange(kinds):
        status, error = _send(server, route, name, value)
        assert status in (200, 400, 404), value[:50]
        if status != 200 and error.get("code") != "context_length_exceeded":
            assert _names(error, route, name), (value[:50], error)


def _bounds(route: Route) -> Iterator[tuple[str, float, float]]:
    """What each number of a body may be, as `/openapi.json` has it."""
    for name, schema in route.raw_fields.items():
        if isinstance(schema, dict):
            yield from _bounds_in(name, schema)


def _bounds_in(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    if schema.get("type") in ("integer", "number"):
        yield path, schema["minimum"], schema["maximum"]
    for each in schema.get("anyOf", ()):
        yield from _bounds_in(path, each)
    for name, each in schema.get("properties", {}).items():
        yield from _bounds_in(f"{path}.{name}", each)


BESIDES: dict[str, dict[str, Any]] = {
    "length_penalty": {"use_beam_search": True},
    "logprobs": {"echo": False},
    "repetition_detection.min_count": {"repetition_detection": {"max_pattern_size": 2}},
    "repetition_detection.min_pattern_size": {"repetition_detection": {"max_pattern_size": 256}},
    "thinking.budget_tokens": {"thinking": {"type": "enabled"}},
    "top_logprobs": {"logprobs": True},
}
"""What a field means nothing without."""

ELSEWHERE = {
    "best_of",  # from `n` on
    "priority",  # this server has none
    "thinking_token_budget",  # this model has no thoughts: refused whatever it is
    "truncate_prompt_tokens",  # to the model's length, which no document knows
}


@pytest.mark.row("S-15")
@pytest.mark.parametrize(
    ("route", "path", "least", "most"),
    [
        pytest.param(route, path, least, most, id=f"{route.path} {path}")
        for route in _routes()
        if route.is_hot
        for path, least, most in _bounds(route)
        if path not in ELSEWHERE
    ],
)
def test_a_number_just_beyond_its_bounds_is_refused_by_name(
    server: HttpServer, route: Route, path: str, least: float, most: float
) -> None:
    """Those that the document declares are those that are checked."""
    step = 1 if isinstance(most, int) else 0.5
    for value in (least - step, most + step):
        beside = {} if route.path == "/v1/responses" else BESIDES.get(path, {})
        body = json.loads(json.dumps({**(route.example or {}), **beside}))
        body.pop("stream", None)
        *outer, last = path.split(".")
        holder = body
        for name in outer:
            holder = holder.setdefault(name, {})
        holder[last] = value
        response = server.http.post(route.path, json=body)
        assert response.status_code == 400, (value, response.text)
        assert _names(response.json()["error"], route, path), response.text


@pytest.mark.row("S-52", "F-35")
@pytest.mark.parametrize(
    ("route", "name"),
    [
        pytest.param(route, name, id=f"{route.path} {name}")
        for route in _routes()
        for name, kinds in _fields(route.body or msgspec.Struct)
        # Other routes have no use for what says how to generate.
        if list[int] in kinds and route.is_hot
    ],
)
def test_every_list_of_token_ids_ends_with_the_vocabulary(
    server: HttpServer, route: Route, name: str
) -> None:
    """One id beyond it would be somebody else's memory on a device."""
    vocab_size = 300
    for token_id in (-1, vocab_size, 2**31 - 1, 2**31):
        status, error = _send(server, route, name, f"[0, {token_id}]")
        assert status == 400, token_id
        assert _names(error, route, name), error
