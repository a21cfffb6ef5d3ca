"""POST /invocations: SageMaker's one route, as in vLLM. A body with `messages` is a chat, one with
`prompt` a completion; it is answered by the route for those."""

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from api.routing import Endpoint, Route
from api.service import Service
from engine.errors import InvalidRequestError

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def routes(service: Service, table: Sequence[Route]) -> list[Route]:
    """`table`: has the routes that answer."""
    endpoints = {route.path: route.endpoint for route in table}
    by_field = {
        "messages": endpoints["/v1/chat/completions"],
        "prompt": endpoints["/v1/completions"],
    }

    async def invocations(request: Request) -> Response:
        raw = await service.bodies.read(request)
        endpoint = _choose(raw, by_field)
        return await endpoint(Request(request.scope, _again(raw, request.receive)))

    summary = "A chat or a completion, by the fields of its body"
    return [Route(("POST",), "/invocations", invocations, generates=True, summary=summary)]


def _choose(raw: bytes, by_field: dict[str, Endpoint]) -> Endpoint:
    try:
        fields = _FIELDS(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return by_field["messages"]  # which says what is wrong with it
    for name, endpoint in by_field.items():
        if name in fields:
            return endpoint
    raise InvalidRequestError("give messages, for a chat, or prompt, for a completion", "messages")


def _again(raw: bytes, receive: Receive) -> Receive:
    """What brings a body that has been read once more, and then what comes."""
    messages: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
