"""GET /metrics: what Prometheus scrapes."""

from starlette.requests import Request
from starlette.responses import Response

from api.metrics import CONTENT_TYPE
from api.routing import Route
from api.service import Service


def routes(service: Service) -> list[Route]:
    async def metrics(request: Request) -> Response:
        return Response(await service.render_metrics(), media_type=CONTENT_TYPE)

    return [
        Route(
            ("GET",),
            "/metrics",
            metrics,
            "metrics",
            summary="Counters and gauges for Prometheus",
            media_type=CONTENT_TYPE,
        )
    ]
