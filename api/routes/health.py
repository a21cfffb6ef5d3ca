"""GET /live, /ready and /health: what probes may conclude (DESIGN: section 8).

/live     200 while the process can recover by itself: also while it loads and drains.
          503 where a restart is the remedy: an engine core is dead or hangs.
/ready    200 while new requests are welcome; its body says why not, and which ranks are missing.
/health   what vLLM's clients expect: 200 once serving, 503 while loading and when dead or hung.
/ping     the same for SageMaker, which may also POST.

All look at what is known already, so they are as quick under load as without: no engine is
asked. That it still works is known from its heartbeats.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api import errors, readiness
from api.edge import STARTING_RETRY_AFTER_S
from api.readiness import Readiness
from api.routing import Route
from api.service import Service, State


def routes(service: Service) -> list[Route]:
    async def live(request: Request) -> Response:
        return _answer(service.state, bad=("hung", "dead"))

    async def ready(request: Request) -> Response:
        now = readiness.assess(service)
        is_ready = now.status == "ready"
        headers = None if is_ready else {"retry-after": str(STARTING_RETRY_AFTER_S)}
        body = msgspec.json.encode(now)
        return Response(body, 200 if is_ready else 503, headers, "application/json")

    async def health(request: Request) -> Response:
        return _answer(service.state, bad=("starting", "hung", "dead"))

    return [
        Route(("GET",), "/live", live, "open", summary="503 where only a restart helps"),
        Route(
            ("GET",),
            "/ready",
            ready,
            "open",
            summary="200 while new requests are welcome",
            answer=Readiness,
        ),
        Route(("GET",), "/health", health, "open", summary="200 once the server serves"),
        Route(("GET", "POST"), "/ping", health, "open", summary="The same as /health"),
    ]


def _answer(state: State, bad: tuple[State, ...]) -> Response:
    if state not in bad:
        return Response()
    code = "engine_dead" if state in ("hung", "dead") else "unavailable"
    return errors.error_response(
        errors.server_failure(503, f"the server is {state}", code, STARTING_RETRY_AFTER_S)
    )
