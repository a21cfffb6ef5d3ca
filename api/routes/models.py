"""GET /v1/models, /v1/models/{id} and /version: who we are."""

from fastapi import APIRouter, Response

import engine
from api import answer
from api.protocol import ModelCard, ModelList
from api.service import Service

_METHODS = ["GET", "HEAD"]


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.api_route("/v1/models", methods=_METHODS, response_model=None)
    async def list_models() -> Response:
        return answer.json_response(
            ModelList([_card(service, name) for name in service.config.served_model_names])
        )

    @routes.api_route("/v1/models/{name:path}", methods=_METHODS, response_model=None)
    async def retrieve_model(name: str) -> Response:
        service.check_model_name(name)
        return answer.json_response(_card(service, name))

    @routes.api_route("/version", methods=_METHODS, response_model=None)
    async def version() -> dict[str, str]:
        return {"version": engine.__version__}

    return routes


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.model.loaded_at,
        max_model_len=service.model.max_model_len,
        root=service.config.served_model_names[0],
    )
