"""Routes of OpenAI and vLLM for other kinds of models: what to tell clients that use them here.

vLLM has them where the model can do it, and answers 404 otherwise. So do we, with a reason.
"""

from starlette.requests import Request
from starlette.responses import Response

from api.errors import HttpError
from api.routing import Route
from api.service import Service

_EMBEDS = "makes no embeddings"
_SCORES = "scores nothing"
_CLASSIFIES = "classifies nothing"
_HEARS = "understands no audio"

_REASONS = {
    "/v1/embeddings": _EMBEDS,
    "/v2/embed": _EMBEDS,
    "/pooling": _EMBEDS,
    "/classify": _CLASSIFIES,
    "/score": _SCORES,
    "/v1/score": _SCORES,
    "/rerank": _SCORES,
    "/v1/rerank": _SCORES,
    "/v2/rerank": _SCORES,
    "/v1/audio/transcriptions": _HEARS,
    "/v1/audio/translations": _HEARS,
}


def routes(service: Service) -> list[Route]:
    return [_refusing(service, path, reason) for path, reason in _REASONS.items()]


def _refusing(service: Service, path: str, reason: str) -> Route:
    async def refuse(request: Request) -> Response:
        name = service.config.served_model_names[0]
        message = f"{name} generates text and {reason}: {path} is for other models"
        raise HttpError(404, message, param="model", code="unsupported_model")

    return Route(("POST",), path, refuse, summary=f"Refused: the model {reason}")
