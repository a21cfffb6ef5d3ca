"""GET /v1/models and /v1/models/{id}: what requests may name."""

from starlette.requests import Request
from starlette.responses import Response

from api import answer
from api.answer_bodies import ModelCard, ModelList, ModelPermission
from api.routing import Route
from api.service import Service

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

    return [
        Route(
            ("GET",),
            "/v1/models",
            list_models,
            summary="The names of the model",
            answer=ModelList,
        ),
        Route(
            ("GET",),
            _ONE_MODEL,
            retrieve_model,
            summary="The model by one of its names",
            answer=ModelCard,
        ),
    ]


def _card(service: Service, name: str) -> ModelCard:
    loaded_at = service.model.loaded_at
    return ModelCard(
        id=name,
        created=loaded_at,
        permission=[ModelPermission(f"modelperm-{name}", loaded_at)],
        max_model_len=service.model.max_model_len,
        root=service.config.served_model_names[0],
    )
