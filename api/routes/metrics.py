"""GET /metrics: what Prometheus scrapes."""

from api.asgi import Request, Response
from api.metrics import CONTENT_TYPE
from api.routing import Route
from api.service import Service


def routes(service: Service) -> list[Route]:
    async def metrics(request: Request) -> Response:
        return Response(await service.render_metrics(), 200, CONTENT_TYPE)

    return [Route(("GET", "HEAD"), "/metrics", metrics)]
