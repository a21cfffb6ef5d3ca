"""GET /v1/models, /v1/models/{id} and /version: who we are."""

from starlette.requests import Request
from starlette.responses import Response

import engine
from api import answer
from api.protocol import ModelCard, ModelList
from api.routing import Route
from api.service import Service

_METHODS = ("GET", "HEAD")
_ONE_MODEL = "/v1/models/{name:path}"
"""Names may hold slashes."""


def routes(service: Service) -> list[Route]:
    async def list_models(request: Request) -> Response:
        return answer.json_response(
            ModelList([_card(service, name) for name in service.config.served_model_names])
        )

    async def retrieve_model(request: Request) -> Response:
        name: str = request.path_params["name"]
        service.check_model_name(name)
        return answer.json_response(_card(service, name))

    async def version(request: Request) -> Response:
        return answer.json_response({"version": engine.__version__})

    return [
        Route(_METHODS, "/v1/models", list_models),
        Route(_METHODS, _ONE_MODEL, retrieve_model),
        Route(_METHODS, "/version", version),
    ]


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.model.loaded_at,
        max_model_len=service.model.max_model_len,
        root=service.config.served_model_names[0],
    )
