"""POST /v1/chat/completions/render and /v1/completions/render: what the model would be asked. Below
/v1/messages and /v1/responses, `endpoint` makes the same.

They take what the routes above them take, and check all of it, and answer with the prompt as text
and as token ids and with every sampling parameter, instead of generating. The shape is that of
vLLM's routes of this name: one object for a conversation, a list for a completion, which may have
several prompts.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api import answer, openapi_fields, text_call
from api.generate import Prompt
from api.protocol import ChatBody, CompletionBody
from api.routes import chat, completions
from api.routing import Route
from api.service import LoadedModel, Service

ReadJob = Callable[[Service, Request], Awaitable[answer.Job]]


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """What the engine would get for one prompt."""

    request_id: str
    model: str
    prompt_text: str
    """The rendered conversation; of a completion, the text of its tokens."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    """All of them, with vLLM's names; `max_tokens` as the model's length allows."""

    stream: bool
    cache_salt: str | None
    priority: int
    features: None = None
    """Of images and the like, which no model here takes."""


def routes(service: Service) -> list[Route]:
    return [
        Route(
            ("POST",),
            "/v1/chat/completions/render",
            endpoint(service, chat.read_job, is_list=False),
            summary="The prompt and the parameters of a chat, without an answer",
            body=ChatBody,
            example=openapi_fields.CHAT_EXAMPLE,
            answer=RenderedPrompt,
        ),
        Route(
            ("POST",),
            "/v1/completions/render",
            endpoint(service, completions.read_job, is_list=True),
            summary="The prompts and the parameters of a completion, without an answer",
            body=CompletionBody,
            example=openapi_fields.COMPLETION_EXAMPLE,
            answer=list[RenderedPrompt],
        ),
    ]


def endpoint(
    service: Service, read_job: ReadJob, *, is_list: bool
) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint that shows what another one, which makes such jobs, would ask."""

    async def render(request: Request) -> Response:
        job = await read_job(service, request)

        def call(model: LoadedModel) -> object:
            prompts = job.prepare(model)
            if not is_list:
                return _rendered(service, job, prompts[0], prompts[0].text)
            return [_rendered(service, job, prompt, _text(model, prompt)) for prompt in prompts]

        return await text_call.respond(service, request, call, job.num_bytes, job.headers)

    return render


def _text(model: LoadedModel, prompt: Prompt) -> str:
    return model.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def _rendered(service: Service, job: answer.Job, prompt: Prompt, text: str) -> RenderedPrompt:
    first = prompt.requests[0]
    return RenderedPrompt(
        request_id=first.request_id,
        model=service.config.served_model_names[0],
        prompt_text=text,
        token_ids=prompt.token_ids,
        sampling_params=_as_object(job.params) | _as_object(first.sampling_params),
        stream=job.is_streamed,
        cache_salt=first.cache_salt,
        priority=first.priority,
    )


def _as_object(value: Any) -> Any:
    """With names, which the form that travels to the engine has not."""
    if not isinstance(value, msgspec.Struct):
        return value
    return {name: _as_object(getattr(value, name)) for name in value.__struct_fields__}
