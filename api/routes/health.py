"""GET /live, /ready and /health: what probes may conclude (DESIGN: section 8).

/live     200 while the process can recover by itself: also while it loads and drains.
          503 where a restart is the remedy: an engine core is dead or hangs.
/ready    200 while new requests are welcome; its body says why not, and which ranks are missing.
/health   what vLLM's clients expect: 200 once serving, 503 while loading and when dead or hung.
          With engine cores that are replaced: 200 while one serves.
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
        return _answer(service, bad=("hung", "dead"))

    async def ready(request: Request) -> Response:
        now = readiness.assess(service)
        is_ready = now.status in ("ready", "degraded")
        headers = None if is_ready else {"retry-after": str(STARTING_RETRY_AFTER_S)}
        body = msgspec.json.encode(now)
        return Response(body, 200 if is_ready else 503, headers, "application/json")

    async def health(request: Request) -> Response:
        return _answer(service, bad=("starting", "hung", "dead"), needs_rank=True)

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


def _answer(service: Service, bad: tuple[State, ...], *, needs_rank: bool = False) -> Response:
    state: str = service.state
    is_dead = state in ("hung", "dead")
    if state not in bad:
        if not needs_rank or state != "serving" or service.client.num_up:
            return Response()
        state = "waiting for its ranks to be back"
    return errors.error_response(
        errors.server_failure(
            503,
            f"the server is {state}",
            "engine_dead" if is_dead else "unavailable",
            STARTING_RETRY_AFTER_S,
        )
    )
