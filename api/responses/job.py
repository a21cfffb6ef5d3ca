"""From a checked request to the job that makes its response.

ResponsesBody + earlier items -> Conversation -> Job -> ResponseFormat
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from api import answer, body, message_plan
from api.conversation import Conversation
from api.generate import Generation, Prompt
from api.limits import MAX_VALUES
from api.message_plan import MessagePlan, MessageReader
from api.responses import input_items, truncate
from api.responses import request as response_request
from api.responses.form import ResponseFormat
from api.responses.items import Item
from api.responses.lookup import Lookup
from api.responses.messages import to_messages
from api.responses.protocol import KNOWN, UNSUPPORTED, ResponsesBody
from api.responses.request import PACKED_THOUGHTS, ResponseRequest
from api.responses.store import ResponseStore
from api.responses.tools import ResponseTools
from api.service import LoadedModel, Service
from api.tokenizer import Tokenizer
from engine.errors import InvalidRequestError, RequestError

_DECODER = msgspec.json.Decoder(ResponsesBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, with all that it refers to."""

    request: ResponseRequest
    input: "Input"
    plan: MessagePlan
    conversation: Conversation
    num_bytes: int
    """Length of its body, and of the texts that it continues."""

    arrived_at: float
    """`time.monotonic()`."""

    headers: dict[str, str]
    """Of the answer: which fields have no effect."""


class Jobs:
    """Makes the jobs of one API server.

    Args:
        service: with the model.
        store: takes responses that have ended.
        lookup: finds earlier ones.
    """

    def __init__(self, service: Service, store: ResponseStore, lookup: Lookup) -> None:
        self._service = service
        self._store = store
        self._lookup = lookup

    def read(self, raw: bytes, arrived_at: float) -> Asked:
        """Check everything that needs no tokens.

        Args:
            raw: the body.
            arrived_at: `time.monotonic()`.

        Raises:
            RequestError: with the field that is wrong.
        """
        fields, ignored = body.decode(raw, _DECODER, KNOWN, UNSUPPORTED)
        service = self._service
        service.check_model_name(fields.model)
        answer.check_priority(fields.priority, service)
        request = response_request.check(fields, service.model.sampling_defaults)
        before: Sequence[Item] = ()
        num_bytes = len(raw)
        if fields.previous_response_id is not None:
            previous = self._lookup.previous(fields.previous_response_id)
            before = previous.items
            num_bytes += self._store.num_item_bytes(previous)
        template = service.model.template.source or ""
        input_ = Input(
            fields, before, self._store.find_item, knows_developers="developer" in template
        )
        plan = message_plan.make(service.model.markup, request.tools.shown, None)
        conversation = Conversation(
            read_messages=input_.read_messages,
            plan=plan,
            params=request.params,
            read_wanted=request.text.read_wanted,
            answer_id=self._store.new_id(),
            variables=request.variables,
            cuts_max_tokens=True,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt,
            param="input",
        )
        return Asked(
            request=request,
            input=input_,
            plan=plan,
            conversation=conversation,
            num_bytes=num_bytes,
            arrived_at=arrived_at,
            headers=body.ignored_header([*ignored, *request.without_effect(template)]),
        )

    def job(self, asked: Asked) -> answer.Job:
        """What is to run."""
        fields, conversation = asked.request.body, asked.conversation
        is_cut = fields.truncation == "auto"
        prepare = partial(truncate.prepare, conversation) if is_cut else conversation.prepare
        return answer.Job(
            bool(fields.stream),
            asked.request.params,
            partial(_prepare, prepare, asked.request.tools),
            partial(self._make_format, asked),
            asked.headers,
            asked.arrived_at,
            asked.num_bytes,
            num_sequences=1,
            render_s=self._service.model.template.short_render_s,
            kept_token_ids=asked.plan.kept_token_ids,
            session=fields.prompt_cache_key,
        )

    def _make_format(
        self, asked: Asked, generation: Generation, prompts: list[Prompt]
    ) -> ResponseFormat:
        fields, plan = asked.request.body, asked.plan
        is_kept = self._store.is_on and fields.store is not False
        response = response_request.new_response(
            asked.request,
            asked.conversation.answer_id,
            fields.model or self._service.config.served_model_names[0],
            is_kept=is_kept,
        )
        reader = MessageReader(plan, is_thinking=prompts[0].is_thinking)
        return ResponseFormat(
            response,
            asked.input.items,
            generation,
            None if plan.is_plain else reader,
            # A run in the background is kept by whoever follows it, with its events.
            self._store.put if is_kept and not fields.background else None,
            _byte_counter(self._service.model.tokenizer, plan.kept_token_ids),
            has_events=bool(fields.stream),
            packs_thoughts=PACKED_THOUGHTS in (fields.include or ()),
        )


class Input:
    """What was said, before a request and in it.

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


def _prepare(
    prepare: Callable[[LoadedModel], list[Prompt]], tools: ResponseTools, model: LoadedModel
) -> list[Prompt]:
    """The prompt; what is wrong with a tool is told in this route's names."""
    try:
        return prepare(model)
    except RequestError as error:
        renamed = tools.renamed(error)
        if renamed is error:
            raise
        raise renamed from error


def _byte_counter(tokenizer: Tokenizer, kept_token_ids: frozenset[int]) -> Callable[[int], int]:
    """How many bytes of the text are a token's: none, if it is not shown."""

    def count(token_id: int) -> int:
        is_hidden = token_id in tokenizer.special_token_ids and token_id not in kept_token_ids
        return 0 if is_hidden else len(tokenizer.token_bytes(token_id))

    return count
