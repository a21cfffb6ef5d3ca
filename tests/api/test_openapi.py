"""The OpenAPI document says what the routes do, all of them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

import api
from api.app import all_routes
from api.config import ApiConfig
from api.engine_client import EngineClient
from api.errors import is_anthropic
from api.openapi import UNLISTED, document
from api.routing import Route
from api.service import Service


class Shape(msgspec.Struct):
    """What to draw."""

    corners: msgspec.Raw
    colour: msgspec.Raw = msgspec.Raw(b"null")
    width: int = msgspec.field(name="line-width", default=1)


class Drawing(msgspec.Struct):
    svg: str


class Stroke(msgspec.Struct):
    to: list[int]


async def endpoint(request: Request) -> Response:
    return Response()


def described(*routes: Route) -> Any:
    return document(routes, version="1.2", model="m", root_path="")


@pytest.fixture(scope="module")
def table() -> Iterator[list[Route]]:
    service = Service(ApiConfig(served_model_names=("m",)), EngineClient(1))
    yield all_routes(service)
    service.close()


@pytest.fixture(scope="module")
def shown(table: list[Route]) -> Any:
    return json.loads(json.dumps(described(*table)))


def test_every_route_is_in_the_document(table: list[Route], shown: Any) -> None:
    """With a summary; a body where one is taken; what comes back, and errors in their shape."""
    for route in table:
        path = route.path.replace(":path", "")
        for method in set(route.methods) - UNLISTED:
            operation = shown["paths"][path][method.lower()]
            assert 0 < len(operation["summary"]) < 80, path
            assert not operation["summary"].endswith("."), path
            assert ("requestBody" in operation) == (route.body is not None), path
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys()
            error = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
            kind = "AnthropicErrorBody" if is_anthropic(path) else "ErrorBody"
            assert error["$ref"].endswith(f"/{kind}")
            assert ("{" in path) == any(p["in"] == "path" for p in operation.get("parameters", ()))


def test_generating_routes_say_what_they_take_and_answer(table: list[Route]) -> None:
    """Whoever adds one describes it: body, an example that fits it, answer, events."""
    for route in table:
        assert not route.is_hot or route.body is not None, route.path
        if route.body is not None:
            assert route.example is not None, route.path
            assert route.answer is not None, route.path


def test_operations_have_names_of_their_own(shown: Any) -> None:
    """Client generators make functions of them."""
    ids = [op["operationId"] for path in shown["paths"].values() for op in path.values()]
    assert len(ids) == len(set(ids))


def test_types_have_names_of_their_api_and_no_modules(shown: Any) -> None:
    """Client generators make classes of them."""
    names = shown["components"]["schemas"].keys()
    assert all(name.isidentifier() for name in names)
    assert {"Usage", "AnthropicUsage", "ResponsesUsage", "StreamOptions"} <= names


def test_references_lead_somewhere(shown: Any) -> None:
    """Each to a schema in the document."""

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for each in value.values():
                yield from references(each)
        elif isinstance(value, list):
            for each in value:
                yield from references(each)

    found = set(references(shown))
    assert len(found) > 10
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in shown["components"]["schemas"]


def test_examples_are_bodies_that_decode(table: list[Route]) -> None:
    """As they stand, they are requests."""
    for route in table:
        if route.example is not None:
            assert route.body is not None
            msgspec.json.decode(msgspec.json.encode(route.example), type=route.body)


def test_fields_that_are_left_raw_are_described() -> None:
    """By a type or a schema; names are those on the wire, and the others keep their own."""
    raw_fields = {"corners": list[int], "colour": {"enum": ["red", "blue"]}}
    body = described(Route(("POST",), "/draw", endpoint, body=Shape, raw_fields=raw_fields))

    shape = body["components"]["schemas"]["Shape"]
    assert shape["description"] == "What to draw."
    assert shape["required"] == ["corners"]
    assert shape["properties"] == {
        "corners": {"type": "array", "items": {"type": "integer"}},
        "colour": {"enum": ["red", "blue"]},
        "line-width": {"type": "integer", "default": 1},
    }


@pytest.mark.row("S-15")
def test_every_number_and_every_list_has_its_bounds(shown: Any) -> None:
    """In bodies, in what they hold, and behind a `?`; of a prompt the model's length is the bound
    of what is no number."""
    for path, schema in _inputs(shown):
        if schema.get("type") in ("integer", "number"):
            most = schema.get("maximum", schema.get("exclusiveMaximum"))
            assert most is not None, path
            assert schema["minimum"] < most, path
        if schema.get("type") == "array" and not re.search(r"completions.*\.prompt", path):
            assert "maxItems" in schema, path


def _inputs(shown: Any) -> Iterator[tuple[str, Any]]:
    """All schemas of what clients send, each with where it stands."""
    for path, operations in shown["paths"].items():
        for operation in operations.values():
            for each in operation.get("parameters", ()):
                yield f"{path}?{each['name']}", each["schema"]
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]["schema"]
                yield from _parts(shown, body, path)


def _parts(shown: Any, schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    if "$ref" in schema:
        schema = shown["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    yield path, schema
    for each in schema.get("anyOf", ()):
        yield from _parts(shown, each, path)
    for name, each in schema.get("properties", {}).items():
        yield from _parts(shown, each, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _parts(shown, schema[key], f"{path}[]")


def test_no_field_is_left_undescribed(table: list[Route]) -> None:
    """What a struct leaves raw, one of its routes describes."""
    described: dict[type[msgspec.Struct], set[str]] = {}
    for route in table:
        if route.body is not None:
            described.setdefault(route.body, set()).update(route.raw_fields)
    for body, names in described.items():
        raw = {f.encode_name for f in msgspec.structs.fields(body) if f.type is msgspec.Raw}
        assert raw <= names, body


def test_a_description_of_no_field_is_a_mistake() -> None:
    """It would describe a field that has been renamed."""
    route = Route(("POST",), "/draw", endpoint, body=Shape, raw_fields={"color": str})
    with pytest.raises(ValueError, match="Shape has no fields color"):
        described(route)


def test_routes_share_types() -> None:
    """A struct of several routes is one schema, whichever of them describes its raw fields."""
    preview = Route(("POST",), "/preview", endpoint, body=Shape, answer=Drawing)
    draw = Route(("POST",), "/draw", endpoint, body=Shape, raw_fields={"corners": list[int]})
    shown = described(preview, draw)

    assert shown["components"]["schemas"].keys() == {
        "Shape",
        "Drawing",
        "ErrorBody",
        "ErrorDetails",
    }
    assert shown["components"]["schemas"]["Shape"]["properties"]["corners"]["type"] == "array"


def test_streams_are_noted() -> None:
    """With what their events hold: chunks, or the error that ended them."""
    route = Route(("POST",), "/draw", endpoint, body=Shape, answer=Drawing, event=Stroke)
    content = described(route)["paths"]["/draw"]["post"]["responses"]["200"]["content"]

    assert content["application/json"]["schema"]["$ref"].endswith("/Drawing")
    event = content["text/event-stream"]["schema"]["properties"]["data"]
    kinds = event["anyOf"][0]["contentSchema"]["anyOf"]
    assert [each["$ref"].split("/")[-1] for each in kinds] == ["Stroke", "ErrorBody"]


def test_parameters_of_a_path_and_a_query_are_named() -> None:
    """Those in the path are always there."""
    route = Route(("GET",), "/drawings/{name:path}", endpoint, query={"scale": int})
    (name, scale) = described(route)["paths"]["/drawings/{name}"]["get"]["parameters"]

    assert (name["name"], name["in"], name["required"]) == ("name", "path", True)
    assert (scale["name"], scale["in"], scale["schema"]) == ("scale", "query", {"type": "integer"})


@pytest.mark.skipif(shutil.which("node") is None, reason="asks node where the script looks")
@pytest.mark.parametrize(
    ("page", "document"),
    [
        ("/docs", "/openapi.json"),
        ("/docs/", "/openapi.json"),
        ("/llm/redoc//", "/llm/openapi.json"),
        ("/llm/docs", "/llm/openapi.json"),
    ],
)
def test_the_page_finds_its_document(page: str, document: str) -> None:
    """Beside itself, behind a proxy too, with or without a slash at the end."""
    html = (Path(api.__file__).parent / "docs.html").read_text(encoding="utf-8")
    [line] = (line for line in html.splitlines() if line.startswith("const base = "))
    script = f"const location = new URL(process.argv[1]); {line}"
    script += 'console.log(new URL("openapi.json", base).href)'
    command = ["node", "-e", script, f"http://a.org{page}"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    assert shown.stdout.strip() == f"http://a.org{document}"


def test_the_proxy_s_prefix_is_where_the_routes_begin() -> None:
    """So that clients made from the document ask there."""
    assert described()["servers"] == [{"url": "/"}]
    shown = document([], version="1", model="m", root_path="/llm")
    assert shown["servers"] == [{"url": "/llm"}]
