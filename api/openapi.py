"""The OpenAPI document: what each route takes and answers, made of the table of routes and of the
structs that requests are decoded to and answers encoded from. Used by `routes.docs`. Pure.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from api.errors import AnthropicErrorBody, ErrorBody, is_anthropic
from api.route_headers import PINNED_RANK, SESSION
from api.routing import Route

OPENAPI_VERSION = "3.1.0"
"""The first whose schemas are those of JSON Schema, which msgspec writes."""

UNLISTED = frozenset({"HEAD", "OPTIONS"})
"""Every route has them, as HTTP defines them."""

_REFS = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_RANK = {"type": "integer", "minimum": 0, "maximum": 10**5 - 1}
_HEADERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    PINNED_RANK: (
        "The data-parallel rank to use.",
        _RANK,
    ),
    SESSION: ("Requests of one session share a rank where that costs nothing.", {"type": "string"}),
}
_DESCRIPTION = (
    "OpenAI's and Anthropic's APIs, and vLLM's additions. An error says which field is wrong, and"
    " has the shape of its API; `x-request-id` of a request comes back with its answer."
)


def document(routes: Sequence[Route], *, version: str, model: str, root_path: str) -> Any:
    """Return the document, as plain JSON values.

    Args:
        routes: all there are.
        version: of the server.
        model: a name to use in examples.
        root_path: where the routes begin, as clients see it; empty without a proxy.
    """
    types = _Types(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        entry = paths.setdefault(_shown_path(route.path), {})
        for method in sorted(set(route.methods) - UNLISTED):
            entry[method.lower()] = _operation(route, method, types, model)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "raywire", "version": version, "description": _DESCRIPTION},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": types.components},
    }


class _Types:
    """The schemas of all types in the table, made together: names are unique among them."""

    def __init__(self, routes: Iterable[Route]) -> None:
        raw_fields: dict[type[msgspec.Struct], dict[str, Any]] = {}
        for route in routes:
            if route.body is not None:
                raw_fields.setdefault(route.body, {}).update(route.raw_fields)
        bodies = {body: _without_raw(body, fields) for body, fields in raw_fields.items()}
        outputs = [kind for route in routes for kind in (route.answer, route.event) if kind]
        queries = [kind for route in routes for kind in route.query.values()]
        others = [*outputs, *queries, *(_error_type(route) for route in routes)]
        types = [*bodies.values(), *others]
        found = msgspec.json.schema_components(types, ref_template=_REFS)
        schemas, self.components = _with_short_names(*found)
        # Unions are equal, not identical, and not always hashable: they are looked up in a list.
        self._schemas = list(zip([*bodies, *others], schemas, strict=True))

    def schema(self, kind: Any) -> Any:
        """Of a type in the table."""
        return next(schema for known, schema in self._schemas if known == kind)


def _with_short_names(
    schemas: Iterable[Any], components: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The same with names that generators of clients can use. msgspec puts the module before names
    that several structs have; here it is the API: `ResponsesUsage`, `AnthropicUsage`, `Usage`."""
    names = {name: _short_name(name) for name in components}
    if len(set(names.values())) < len(names):
        raise ValueError(f"two structs of one API have one name: {sorted(names.values())}")
    refs = {_REFS.format(name=old): _REFS.format(name=new) for old, new in names.items()}
    shown = {new: _replaced(components[old], refs) for old, new in names.items()}
    return [_replaced(each, refs) for each in schemas], shown


def _short_name(name: str) -> str:
    *modules, own = name.split(".")
    return f"{modules[1].capitalize()}{own}" if len(modules) > 2 else own


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """A JSON value, with some of its texts by others."""
    if isinstance(value, dict):
        return {key: _replaced(each, texts) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, texts) for each in value]
    return texts.get(value, value) if isinstance(value, str) else value


def _without_raw(body: type[msgspec.Struct], raw_fields: Mapping[str, Any]) -> type[msgspec.Struct]:
    """The struct as clients see it. What it leaves raw is decoded later, and msgspec can describe
    neither the field nor its default."""
    fields = msgspec.structs.fields(body)
    if unknown := raw_fields.keys() - {field.encode_name for field in fields}:
        raise ValueError(f"{body.__name__} has no fields {', '.join(sorted(unknown))}")
    shown = []
    for field in fields:
        is_raw = field.encode_name in raw_fields or field.type is msgspec.Raw
        kind = _as_type(raw_fields.get(field.encode_name, {})) if is_raw else field.type
        default = msgspec.UNSET if is_raw and not field.required else field.default
        options: dict[str, Any] = {"default": default, "default_factory": field.default_factory}
        shown.append((field.name, kind, msgspec.field(name=field.encode_name, **options)))
    return msgspec.defstruct(
        body.__name__,
        shown,
        module=body.__module__,
        namespace={"__doc__": body.__doc__},
        kw_only=True,
    )


def _as_type(described: Any) -> Any:
    """A type whose schema is this one."""
    if not isinstance(described, dict):
        return described
    return Annotated[Any, msgspec.Meta(extra_json_schema=described)]


def _operation(route: Route, method: str, types: _Types, model: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(method, route.path),
    }
    if parameters := _parameters(route, types):
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _body(route, types, model)}
    operation["responses"] = _responses(route, types)
    return operation


def _parameters(route: Route, types: _Types) -> list[dict[str, Any]]:
    path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(route.path)
    ]
    query = [
        {"name": name, "in": "query", "schema": types.schema(kind)}
        for name, kind in route.query.items()
    ]
    headers = [
        {"name": name, "in": "header", "description": text, "schema": schema}
        for name, (text, schema) in _HEADERS.items()
    ]
    return [*path, *query, *(headers if route.is_hot else ())]


def _body(route: Route, types: _Types, model: str) -> dict[str, Any]:
    content = {"schema": types.schema(route.body)}
    if route.example is not None:
        assert route.body is not None
        named = {"model": model} if "model" in route.body.__struct_fields__ else {}
        content["example"] = {**named, **route.example}
    return {"application/json": content}


def _responses(route: Route, types: _Types) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success."}
    if content := _content(route, types):
        success["content"] = content
    error = {"application/json": {"schema": types.schema(_error_type(route))}}
    wrong = "The request is wrong; `param` names the field."
    failed = "Not now, or our fault; `retry-after` says when to come back."
    return {
        "200": success,
        "4XX": {"description": wrong, "content": error},
        "5XX": {"description": failed, "content": error},
    }


def _content(route: Route, types: _Types) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": types.schema(route.answer)}
    elif route.media_type != "application/json":
        content[route.media_type.partition(";")[0]] = {"schema": {"type": "string"}}
    if route.event is not None:
        kinds = [types.schema(route.event), types.schema(_error_type(route))]
        content["text/event-stream"] = {"schema": _event(kinds)}
    return content


def _event(kinds: Sequence[Any]) -> dict[str, Any]:
    """One event, in the form that OpenAPI 3.2 gives to streams: data is a text that holds JSON."""
    json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    data = {"type": "string", "anyOf": [json, {"const": "[DONE]"}]}
    return {
        "description": "Each event, with `stream: true`; `[DONE]`, or an error, is the last.",
        "type": "object",
        "properties": {"data": data},
        "required": ["data"],
    }


def _error_type(route: Route) -> type[msgspec.Struct]:
    return AnthropicErrorBody if is_anthropic(route.path) else ErrorBody


def _shown_path(path: str) -> str:
    return _PATH_PARAMETER.sub(r"{\1}", path)


def _operation_id(method: str, path: str) -> str:
    words = re.findall(r"[A-Za-z0-9]+", _shown_path(path))
    return "_".join([method.lower(), *words])
