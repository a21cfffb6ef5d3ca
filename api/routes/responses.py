"""POST /v1/responses, and what may be done with a response afterwards: read it, list what it was
given, cancel it, delete it.

    body -> ResponseRequest -> conversation -> job -> answer (whole, streamed)     the connection's
                                                   -> run -> store                 the background's
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from api import answer, body, client_watch, message_plan, route_headers
from api.conversation import Conversation
from api.generate import Generation, Prompt
from api.message_plan import MessageReader
from api.prompts import MAX_VALUES
from api.responses import input_items, item_list, truncate
from api.responses import request as response_request
from api.responses.background import History, HistoryReader, Run, Runs
from api.responses.form import ResponseFormat
from api.responses.items import Item
from api.responses.lookup import Lookup
from api.responses.messages import to_messages
from api.responses.protocol import (
    KNOWN,
    UNSUPPORTED,
    Deleted,
    Event,
    ItemList,
    Response,
    ResponsesBody,
)
from api.responses.store import ResponseStore
from api.routes import render
from api.routing import Route
from api.service import Service
from api.sse import EventStream
from api.tokenizer import Tokenizer
from engine.errors import InvalidRequestError

_DECODER = msgspec.json.Decoder(ResponsesBody)
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
            summary="An answer in items: thoughts, messages, calls",
            body=ResponsesBody,
            raw_fields={"input": str | list[Any]},
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
            ("GET",),
            _ONE,
            endpoints.retrieve,
            summary="A response that is kept, or its events from anywhere on",
            query={"stream": bool, "starting_after": int},
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
            query={"after": str, "limit": int, "order": str},
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
        for name, documentation, read in (
            ("responses_stored", "Responses that are kept", self._store.__len__),
            ("responses_stored_bytes", "What they take", lambda: self._store.num_bytes),
            ("responses_in_background", "Responses that run on their own", self._runs.__len__),
        ):
            service.metrics.watch(name, documentation, read)

    async def create(self, request: Request) -> HttpResponse:
        fields, job = await self._read(request)
        if fields.background:
            return await self._start(request, job)
        return await answer.respond(self._service, request, job)

    async def read_job(self, service: Service, request: Request) -> answer.Job:
        """What a request asks for."""
        _, job = await self._read(request)
        return job

    async def _read(self, request: Request) -> tuple[ResponsesBody, answer.Job]:
        raw = await self._service.bodies.read(request)
        arrived_at = time.monotonic()
        fields, ignored = body.decode(raw, _DECODER, KNOWN, UNSUPPORTED)
        return fields, self._job(fields, len(raw), arrived_at, ignored)

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

    # ------------------------------------------------------------------------------- create

    def _job(
        self, fields: ResponsesBody, num_bytes: int, arrived_at: float, ignored: list[str]
    ) -> answer.Job:
        """Everything that can be wrong without looking at tokens."""
        service = self._service
        service.check_model_name(fields.model)
        answer.check_priority(fields.priority, service)
        wanted = response_request.check(fields)
        before: Sequence[Item] = ()
        if fields.previous_response_id is not None:
            previous = self._lookup.previous(fields.previous_response_id)
            before = previous.items
            num_bytes += self._store.num_item_bytes(previous)
        template = service.model.template
        source = template.source or ""
        knows_developers = "developer" in source
        asked = _Input(fields, before, self._store.find_item, knows_developers=knows_developers)
        response_id = self._store.new_id()
        plan = message_plan.make(service.model.markup, wanted.tools, None)
        conversation = Conversation(
            read_messages=asked.read_messages,
            plan=plan,
            params=wanted.params,
            answer_id=response_id,
            variables=wanted.variables,
            cuts_max_tokens=True,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt,
            param="input",
        )

        def make_format(generation: Generation, prompts: list[Prompt]) -> ResponseFormat:
            name = fields.model or service.config.served_model_names[0]
            is_kept = self._store.is_on and fields.store is not False
            keep = self._store.put if is_kept and not fields.background else None
            reader = MessageReader(plan, is_thinking=prompts[0].is_thinking)
            return ResponseFormat(
                response_request.new_response(wanted, response_id, name, is_kept=is_kept),
                asked.items,
                generation,
                None if plan.is_plain else reader,
                keep,
                _byte_counter(service.model.tokenizer, plan.kept_token_ids),
                has_events=bool(fields.stream),
            )

        return answer.Job(
            bool(fields.stream),
            wanted.params,
            (
                partial(truncate.prepare, conversation)
                if fields.truncation == "auto"
                else conversation.prepare
            ),
            make_format,
            body.ignored_header([*ignored, *wanted.without_effect(source)]),
            arrived_at,
            num_bytes,
            num_sequences=1,
            render_s=template.short_render_s,
            kept_token_ids=plan.kept_token_ids,
        )

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
        wish = route_headers.read(request.headers.raw, self._service.ranks)
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


class _Input:
    """What was said, before this request and in it.

    Args:
        fields: of the request.
        before: the conversation that it continues.
        find: finds what a model wrote in earlier responses, by its name.
        knows_developers: the chat template reads messages of developers.
    """

    def __init__(
        self,
        fields: ResponsesBody,
        before: Sequence[Item],
        find: Callable[[str], Item | None],
        *,
        knows_developers: bool,
    ) -> None:
        self.items: Sequence[Item] = before
        """All of it, once it is read."""
        self._new: list[Item] | None = None
        self._fields = fields
        self._find = find
        self._knows_developers = knows_developers

    def read_messages(self) -> list[dict[str, Any]]:
        """The same as messages. Reads the request once, however often it is called."""
        if self._new is None:
            self._new = input_items.read(self._fields.input, self._find)
            self.items = [*self.items, *self._new]
        if len(self.items) > MAX_VALUES:
            raise InvalidRequestError(
                f"the conversation has {len(self.items)} items; {MAX_VALUES} are the most", "input"
            )
        return to_messages(
            self.items, self._fields.instructions, knows_developers=self._knows_developers
        )


def _byte_counter(tokenizer: Tokenizer, kept_token_ids: frozenset[int]) -> Callable[[int], int]:
    """How many bytes of the text are a token's: none, if it is not shown."""

    def count(token_id: int) -> int:
        is_hidden = token_id in tokenizer.special_token_ids and token_id not in kept_token_ids
        return 0 if is_hidden else len(tokenizer.token_bytes(token_id))

    return count


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
