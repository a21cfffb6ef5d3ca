"""`truncation: auto`: a conversation that is too long loses its oldest turns. Used by the route, in
the threads that tokenize."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from api.conversation import Conversation
from api.generate import Prompt
from api.service import LoadedModel
from engine.errors import ContextLengthError

Messages = Sequence[dict[str, Any]]


def prepare(conversation: Conversation, model: LoadedModel) -> list[Prompt]:
    """The `prepare` of a conversation, of which as many turns are left out as must be, the oldest
    first. The system's message at the start stays, and so does the last turn.

    Raises:
        RequestError: as `Conversation.prepare`, or the last turn alone is too long.
    """
    # A limit for the output is room to leave for it, if any conversation could.
    max_tokens = conversation.params.max_tokens or 0
    has_room = max_tokens < model.inputs.max_model_len
    whole = replace(conversation, cuts_max_tokens=not has_room)
    try:
        return whole.prepare(model)
    except ContextLengthError as error:
        messages = conversation.read_messages()
        found = _longest(whole, messages, model)
        if found is None:
            raise error
        return found


def _longest(
    conversation: Conversation, messages: Messages, model: LoadedModel
) -> list[Prompt] | None:
    """The prompt of the longest end of a conversation that fits, if any does."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "user"][1:]
    head = messages[:1] if messages and messages[0]["role"] in ("system", "developer") else []
    found: list[Prompt] | None = None
    first, end = 0, len(starts)
    while first < end:  # rendering and encoding take long, so few of them are tried
        middle = (first + end) // 2
        shorter = [*head, *messages[starts[middle] :]]
        try:
            found = replace(conversation, read_messages=partial(list, shorter)).prepare(model)
            end = middle
        except ContextLengthError:
            first = middle + 1
    return found
