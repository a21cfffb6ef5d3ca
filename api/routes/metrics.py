"""GET /metrics: what Prometheus scrapes."""

from fastapi import APIRouter, Request, Response

from api.metrics import CONTENT_TYPE
from api.service import Service


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics(request: Request) -> Response:
        return Response(await service.render_metrics(), headers={"content-type": CONTENT_TYPE})

    return routes
