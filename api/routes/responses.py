"""POST /v1/responses, and what may be done with a response afterwards: read it, list what it was
given, cancel it, delete it.

    body -> job -> answer (whole, streamed) -> store       the connection's
                -> run                      -> store       the background's
"""

import time
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from api import answer, client_watch, openapi_fields, text_call
from api.generate import Generation
from api.responses import item_list
from api.responses.background import History, HistoryReader, Run, Runs
from api.responses.form import ResponseFormat
from api.responses.job import Asked, Jobs
from api.responses.lookup import Lookup
from api.responses.protocol import (
    Deleted,
    Event,
    InputTokens,
    ItemList,
    Response,
    ResponsesBody,
)
from api.responses.store import ResponseStore
from api.routes import render
from api.routing import Route
from api.service import LoadedModel, Service
from api.sse import EventStream
from engine.errors import InvalidRequestError

_PATH = "/v1/responses"
_ONE = f"{_PATH}/{{response_id}}"


def routes(service: Service) -> list[Route]:
    endpoints = _Responses(service)
    return [
        Route(
            ("POST",),
            _PATH,
            endpoints.create,
            is_hot=True,
            generates=True,
            summary="An answer in items: thoughts, messages, calls",
            body=ResponsesBody,
            raw_fields=openapi_fields.RESPONSE,
            example={"input": "Say hi."},
            answer=Response,
            event=Event,
        ),
        Route(
            ("POST",),
            f"{_PATH}/render",
            render.endpoint(service, endpoints.read_job, is_list=False),
            summary="The prompt and the parameters of a response, without an answer",
            body=ResponsesBody,
            example={"input": "Say hi."},
            answer=render.RenderedPrompt,
        ),
        Route(
            ("POST",),
            f"{_PATH}/input_tokens",
            endpoints.count_input,
            summary="How many tokens a response would be given",
            body=ResponsesBody,
            example={"input": "Say hi."},
            answer=InputTokens,
        ),
        Route(
            ("GET",),
            _ONE,
            endpoints.retrieve,
            summary="A response that is kept, or its events from anywhere on",
            query={"stream": bool, "starting_after": item_list.Place},
            answer=Response,
            event=Event,
        ),
        Route(("DELETE",), _ONE, endpoints.delete, summary="Forget a response", answer=Deleted),
        Route(
            ("POST",),
            f"{_ONE}/cancel",
            endpoints.cancel,
            summary="End a response that runs in the background",
            answer=Response,
        ),
        Route(
            ("GET",),
            f"{_ONE}/input_items",
            endpoints.list_input,
            summary="What a response was given",
            query={"after": str, "limit": item_list.PageSize, "order": Literal["asc", "desc"]},
            answer=ItemList,
        ),
    ]


class _Responses:
    """The endpoints of one API server, with what it keeps."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.config
        self._store = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
        self._runs = Runs()
        self._lookup = Lookup(self._store, self._runs)
        self._jobs = Jobs(service, self._store, self._lookup)
        for name, documentation, read in (
            ("responses_stored", "Responses that are kept", self._store.__len__),
            ("responses_stored_bytes", "What they take", lambda: self._store.num_bytes),
            ("responses_in_background", "Responses that run on their own", self._runs.__len__),
        ):
            service.metrics.watch(name, documentation, read)

    async def create(self, request: Request) -> HttpResponse:
        asked = await self._read(request)
        job = self._jobs.job(asked)
        if asked.request.body.background:
            return await self._start(request, job)
        return await answer.respond(self._service, request, job)

    async def read_job(self, service: Service, request: Request) -> answer.Job:
        """What a request asks for."""
        return self._jobs.job(await self._read(request))

    async def count_input(self, request: Request) -> HttpResponse:
        asked = await self._read(request)

        def call(model: LoadedModel) -> InputTokens:
            return InputTokens(len(asked.conversation.render(model).token_ids))

        return await text_call.respond(self._service, request, call, asked.num_bytes, asked.headers)

    async def _read(self, request: Request) -> Asked:
        raw = await self._service.bodies.read(request)
        return self._jobs.read(raw, time.monotonic())

    async def retrieve(self, request: Request) -> HttpResponse:
        response_id = request.path_params["response_id"]
        is_streamed, num_seen = item_list.read_stream_query(request.query_params)
        if is_streamed:
            return _stream(request, self._lookup.history(response_id), num_seen, {})
        run = self._runs.get(response_id)
        if run is not None:
            return answer.json_response(run.form.response)
        return _json(self._lookup.stored(response_id).body)

    async def delete(self, request: Request) -> HttpResponse:
        response_id = request.path_params["response_id"]
        run = self._runs.get(response_id)
        if run is not None:
            run.cancel()
        self._lookup.stored(response_id)
        self._store.remove(response_id)
        return answer.json_response(Deleted(response_id))

    async def cancel(self, request: Request) -> HttpResponse:
        response_id = request.path_params["response_id"]
        run = self._runs.get(response_id)
        if run is not None:
            run.cancel()
        stored = self._lookup.stored(response_id)
        if not stored.is_background:
            raise InvalidRequestError(
                "only responses that were created with background: true can be cancelled;"
                " for others close the connection",
                "response_id",
            )
        return _json(stored.body)

    async def list_input(self, request: Request) -> HttpResponse:
        items = self._lookup.conversation(request.path_params["response_id"])
        return answer.json_response(item_list.page(items, request.query_params))

    async def _start(self, request: Request, job: answer.Job) -> HttpResponse:
        """Run a job in the background."""
        if not self._store.is_on:
            raise InvalidRequestError(
                "background needs a server that keeps responses: this one was started with"
                " --max-stored-responses 0",
                "background",
            )
        self._runs.check_room()
        generation = Generation()
        watch = client_watch.of(request)
        wish = answer.route_wish(self._service, request, job)
        is_started = False
        try:
            form, headers = await answer.start(self._service, job, generation, watch, wish)
            generation.check_client()
            is_started = True
        finally:
            watch.stop()
            if not is_started:
                generation.close()
        assert isinstance(form, ResponseFormat)
        run = Run(form, generation, self._store.put)
        self._runs.start(run)
        if job.is_streamed:
            return _stream(request, run.history, 0, headers)
        return answer.json_response(form.response, headers)


def _stream(
    request: Request, history: History, num_seen: int, headers: dict[str, str]
) -> EventStream:
    """Events of a response that does not end with this connection."""
    reader = HistoryReader(history, num_seen)
    watch = client_watch.of(request)
    watch.start(reader.leave)
    return EventStream(reader, watch.stop, headers)


def _json(encoded: bytes) -> HttpResponse:
    return HttpResponse(encoded, 200, media_type="application/json")
