"""From a conversation to the prompt that its answer follows. What all routes that take messages
share; each reads its own request into a `Conversation` and makes its own JSON of the answer.

    messages, tools -> chat template -> text -> token ids -> engine requests
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from api import thinking_budget
from api.generate import Prompt
from api.message_plan import MessagePlan
from api.sampling import SamplingParams
from api.service import LoadedModel
from api.structured.fields import Wanted
from api.truncation import Truncation
from api.typed_tokens import unmarked
from engine.errors import InvalidRequestError


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What was said, and how the model is to go on."""

    read_messages: Callable[[], list[dict[str, Any]]]
    """Decodes and checks what was said, into what the chat template reads. Called by `prepare`:
    long conversations take milliseconds."""

    plan: MessagePlan
    """With the tools that the model is shown."""

    params: SamplingParams
    answer_id: str
    read_wanted: Callable[[], Wanted | None] = _nothing
    """Decodes and checks what the request says of the answer's form; called by `prepare`."""

    variables: dict[str, Any] = field(default_factory=dict)
    """What else the template reads."""

    read_documents: Callable[[], list[dict[str, str]] | None] = lambda: None
    """As `read_messages`, what the template may quote."""

    template: str | None = None
    """Jinja text in place of the model's own template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    is_echoed: bool = False
    """The answer repeats the last message, if it is the assistant's."""

    truncation: Truncation | None = None
    """What is to be left of the prompt, if it is too long."""

    add_special_tokens: bool = False
    cuts_max_tokens: bool = False
    """More output than the model's length leaves is asked for as much as it leaves."""

    split_special_tokens: bool = True
    """Special tokens in what was said are text like any other."""

    priority: int = 0
    cache_salt: str | None = None
    param: str = "messages"
    """What clients call the field that holds what was said, for errors."""

    def render(self, model: LoadedModel) -> "RenderedConversation":
        """The prompt, not bound to the model's length.

        Raises:
            RequestError: a message is malformed, the template refuses them, or no model could take
                so long a text.
        """
        messages = self.read_messages()
        tools = self.plan.tools
        template = model.template
        if self.template is not None:
            template = model.brought_templates.get(self.template, model.tokenizer)
        try:
            text = template.render(
                messages,
                tools=tools.definitions if tools is not None else None,
                documents=self.read_documents(),
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                variables=self.variables,
                split_special_tokens=self.split_special_tokens,
            )
        except InvalidRequestError as error:
            if error.param != "messages":
                raise
            raise InvalidRequestError(error.message, self.param) from error
        token_ids = model.inputs.encode(
            text,
            add_special_tokens=self.add_special_tokens,
            param=self.param,
            truncation=self.truncation,
            num_output_tokens=self.params.max_tokens,
        )
        beginning = messages[-1].get("content") if self.continue_final_message else None
        return RenderedConversation(
            unmarked(text),
            token_ids,
            is_thinking=self.plan.is_thinking(text, beginning),
            may_think=self.plan.may_think(text, beginning),
            echoed=_last_words(messages) if self.is_echoed else "",
        )

    def prepare(self, model: LoadedModel) -> list[Prompt]:
        """Render and tokenize: the `prepare` of an `answer.Job`.

        Raises:
            RequestError: as `render`, or they are too long.
        """
        rendered = self.render(model)
        bound = self.plan.grammar(
            self.read_wanted(), is_thinking=rendered.is_thinking, may_think=rendered.may_think
        )
        params = self.params if bound is None else self.params.bound_by(bound.output)
        requests = model.inputs.make_requests(
            rendered.token_ids,
            thinking_budget.opened(params, rendered.is_thinking),
            request_id=self.answer_id,
            default_max_tokens=model.sampling_defaults.max_tokens,
            cuts_max_tokens=self.cuts_max_tokens,
            priority=self.priority,
            cache_salt=self.cache_salt,
            param=self.param,
        )
        return [
            Prompt(
                rendered.token_ids,
                requests,
                rendered.text,
                is_thinking=rendered.is_thinking,
                beginning=rendered.echoed,
                bound=bound,
            )
        ]


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """What the model reads."""

    text: str
    token_ids: list[int]
    is_thinking: bool
    """It ends inside a thought, where thoughts are told apart."""

    may_think: bool = False
    """So it does, or the answer may begin with one."""

    echoed: str = ""
    """What the answer repeats of it."""


def _last_words(messages: list[dict[str, Any]]) -> str:
    """The text of the last message, if the answer goes on with it."""
    content = messages[-1].get("content")
    if messages[-1].get("role") != "assistant" or content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
