"""The items of the Responses API: what a conversation consists of, in requests, answers and store.

    message | reasoning | function_call | function_call_output

Each is encoded as it is, so fields and their names are OpenAI's. Items that are complete are never
changed again: responses that follow each other share them.
"""

from typing import Literal

import msgspec

from api.answer_bodies import TokenLogprob

Role = Literal["user", "system", "developer", "assistant"]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """A text of anybody but the model."""

    text: str


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A text of the model."""

    text: str
    annotations: list[None] = []
    """None here: they cite what built-in tools have found."""
    logprobs: list[TokenLogprob] = []


class Refusal(msgspec.Struct, tag_field="type", tag="refusal"):
    """A text in which some model of OpenAI's has refused; ours write texts."""

    refusal: str


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """What it thought, in short. Only in requests: ours do not summarise."""

    text: str


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    role: Role
    content: list[InputText | OutputText | Refusal]
    status: Status = "completed"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None
    """The content packed, where a client asks for that: `packed_thought`."""
    status: Status = "completed"

    @property
    def text(self) -> str:
        """The thought, or what there is of it."""
        return "".join(part.text for part in self.content or self.summary)


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    """What the result names."""
    name: str
    arguments: str
    """JSON, if the model has written JSON."""
    status: Status = "completed"


class FunctionCallOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[InputText]
    status: Status = "completed"


Item = Message | ReasoningItem | FunctionCall | FunctionCallOutput
OutputItem = Message | ReasoningItem | FunctionCall
