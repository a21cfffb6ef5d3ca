"""Builds the application: routes, errors in OpenAI's shape, and the edge around them."""

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from api import errors
from api.edge import Edge
from api.routes import chat, completions, health, metrics, models
from api.service import Service
from engine.errors import RaywireError


def build(service: Service) -> ASGIApp:
    """The whole HTTP surface of one API server."""
    app = FastAPI(
        title="raywire",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers={
            RaywireError: _on_our_error,
            HTTPException: _on_routing_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_unforeseen_error,
        },
    )
    for part in (chat, completions, models, health, metrics):
        app.include_router(part.router(service))
    return Edge(app, service)


async def _on_our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RaywireError)
    return errors.error_response(errors.describe(error))


async def _on_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return errors.error_response(
        errors.routing_failure(
            error.status_code, request.url.path, request.method, dict(error.headers or {})
        )
    )


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _on_unforeseen_error(request: Request, error: Exception) -> Response:
    # The error goes on to uvicorn, which logs its traceback.
    return errors.error_response(errors.internal_failure())
