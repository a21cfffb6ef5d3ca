"""Messages to the text of a prompt, by the model's own Jinja template, with transformers'
conventions.

Used by `conversation` and `LLM.chat`. Templates come with models, so they are not trusted with the
interpreter: they run in a sandbox (`template_sandbox`), see plain data only, and are stopped when
they run too long or write too much. Rendering takes as long as it takes: `short_render_s` says how
long at least, and what takes long is called off the event loop.

The begin token is the template's business: encode what `render` returns with
`add_special_tokens=False`, or it comes twice. Special tokens in what users say are marked, so that
they are encoded as text (`typed_tokens`); the template's own are not.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jinja2

from api import template_calls, template_sandbox
from api.limits import MAX_MESSAGE_DEPTH
from api.tokenizer import Tokenizer
from api.typed_tokens import NO_MARKS, ChatMarks
from engine.errors import InvalidRequestError, UnsupportedFieldError

Message = Mapping[str, Any]
Mark = Callable[[str], str]
"""Marks tokens in a text that comes from a request."""

_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "self"),
    }
)
"""Arguments of `render`, which a client sets through fields of their own, and Jinja's own name."""

_WITH_TOOLS = ("tool_use", "default")
"""Names of templates for a conversation with tools: the first that there is."""

_TOOLS_NAME = re.compile(r"\btools\b")


_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

# Private-use characters: no tokenizer's business and no template's. The space at the end shows
# whether the template trims its messages.
_CUT_HERE = "\ue000cut here\ue000"
_CUT_MARK = f"{_CUT_HERE} "


class ChatTemplate:
    """The chat template of one model. Safe to use from several threads.

    Args:
        templates: by name; "default" is used, or "tool_use" where tools are given.
        special_tokens: variables such as `bos_token`.
        field: of the request, to blame where a template fails: the model's own has been tried, so
            it is the messages.

    Raises:
        ConfigError: a template is no valid Jinja.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        field: str = "messages",
    ) -> None:
        self._marks = NO_MARKS
        self._field = field
        self._special_tokens = dict(special_tokens or {})
        environment = template_sandbox.make_environment()
        self._templates = {
            name: template_sandbox.compile_template(environment, name, source)
            for name, source in templates.items()
        }
        self._sources = dict(templates)
        self._takes_parts = {name: self._probe_parts(name) for name in templates}
        self._call_forms = {
            name: template_calls.probe(partial(self._render_plainly, name)) for name in templates
        }
        self.short_render_s = max((self._time_probe(name) for name in templates), default=0.0)
        """Processor time that the shortest of conversations takes."""

    @classmethod
    def load(
        cls, tokenizer: Tokenizer, template: str | None = None, field: str = "messages"
    ) -> "ChatTemplate":
        """The template that comes with the tokenizer, or `template` in its place."""
        templates = tokenizer.chat_templates if template is None else {"default": template}
        loaded = cls(templates, tokenizer.special_tokens, field)
        loaded._marks = ChatMarks(
            tokenizer.special_token_texts,
            tokenizer.added_token_texts,
            "".join(map(loaded._render_turns, templates)),
            templates.values(),
        )
        return loaded

    @property
    def source(self) -> str | None:
        """Of the template that is used where tools are given."""
        return next((self._sources[name] for name in _WITH_TOOLS if name in self._sources), None)

    @property
    def reads_tools(self) -> bool:
        """Whether the template that is used where tools are given can show them to the model."""
        return _TOOLS_NAME.search(self.source or "") is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        split_special_tokens: bool = True,
    ) -> str:
        """The text of a conversation, for `Tokenizer.encode`; `typed_tokens.unmarked` makes it one
        for people.

        Args:
            messages: as in OpenAI's API; `content` is a string or a list of text parts.
            tools: JSON schemas of functions.
            documents: for templates that quote documents.
            add_generation_prompt: end with the header of the answer to come.
            continue_final_message: leave the last message open, for the model to continue.
            variables: whatever else the template reads (`enable_thinking`, …), under names that
                `check_variables` lets pass.
            split_special_tokens: special tokens in all of the above are text like any other.
                False: they are what they look like.

        Raises:
            InvalidRequestError: the model has no template, a variable's name is taken, or the
                template renders nothing or refuses the conversation, in its own words.
            UnsupportedFieldError: a message holds an image or another part that is no text.
        """
        if not messages:
            raise InvalidRequestError("messages must not be empty", "messages")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt to be false: the last message"
                " is continued or a new one begins, not both",
                "continue_final_message",
            )
        variables = variables or {}
        check_variables(variables, self._special_tokens)
        name = self._choose(has_tools=bool(tools))
        marks = self._marks if split_special_tokens else NO_MARKS
        conversation = [self._prepare(name, i, each, marks) for i, each in enumerate(messages)]
        if continue_final_message:
            _mark_end(conversation[-1])
        text = self._run(
            name,
            {
                **_plain(variables, "chat_template_kwargs", marks.of_developer),
                **self._special_tokens,
                "messages": conversation,
                "tools": _plain(tools, "tools", marks.of_developer),
                "documents": _plain(documents, "documents", marks.of_others),
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if continue_final_message:
            text = _cut_at_mark(text)
        if not text:
            raise InvalidRequestError(
                "the chat template rendered nothing for these messages", self._field
            )
        return text

    def _choose(self, *, has_tools: bool) -> str:
        for name in _WITH_TOOLS if has_tools else ("default",):
            if name in self._templates:
                return name
        raise InvalidRequestError(
            "this model has no chat template: send a completion request, or start the server with"
            " --chat-template",
            "messages",
        )

    def _prepare(self, name: str, place: int, message: Message, marks: ChatMarks) -> dict[str, Any]:
        """One message as plain data, in the form that the template reads."""
        where = f"messages[{place}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"{where} must be an object with a role", where)
        # OpenAI's clients send null for what is absent; templates test for absence.
        present = {key: value for key, value in message.items() if value is not None}
        plain: dict[str, Any] = _plain(present, where, marks.of(message["role"]))
        if isinstance(plain.get("content"), list):
            _check_parts(plain["content"], f"{where}.content")
            if not self._takes_parts[name] or plain["role"] == "tool":
                plain["content"] = "\n".join(part["text"] for part in plain["content"])
        reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        return self._call_forms[name].convert(plain) if "tool_calls" in plain else plain

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether a system message may follow others: many templates refuse it or leave it out."""
        roles = ("user", "assistant", "system", "user")
        messages = [{"role": role, "content": f"probed {role}"} for role in roles]
        try:
            return f"probed {roles[2]}" in self._render_plainly("default", messages)
        except (InvalidRequestError, KeyError):
            return False

    def _probe_parts(self, name: str) -> bool:
        """Whether the template reads content given as a list of parts, rather than printing it."""
        messages = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
        try:
            text = self._render_plainly(name, messages)
        except InvalidRequestError:
            return False
        return "probe" in text and "'text'" not in text and '"text"' not in text

    def _render_turns(self, name: str) -> str:
        """Two turns and the beginning of a third; nothing where the template wants other ones."""
        roles = ("user", "assistant", "user")
        try:
            return self._render_plainly(name, [{"role": r, "content": "probe"} for r in roles])
        except InvalidRequestError:
            return ""

    def _render_plainly(self, name: str, messages: Sequence[Message]) -> str:
        """Messages that need no preparation, without anything beside them."""
        return self._run(
            name, {**self._special_tokens, "messages": messages, "add_generation_prompt": True}
        )

    def _time_probe(self, name: str) -> float:
        """Least of three: the first fills caches."""
        took_s = []
        for _ in range(3):
            began = time.thread_time()
            self._probe_parts(name)
            took_s.append(time.thread_time() - began)
        return min(took_s)

    def _run(self, name: str, variables: Mapping[str, Any]) -> str:
        try:
            return template_sandbox.render(self._templates[name], variables)
        except jinja2.TemplateError as error:
            # The base class itself is `raise_exception`: the template works, and refuses messages.
            field = "messages" if type(error) is jinja2.TemplateError else self._field
            raise InvalidRequestError(error.message or type(error).__name__, field) from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,  # and RecursionError
            TypeError,
            ValueError,
        ) as error:
            raise InvalidRequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}",
                self._field,
            ) from error


def check_variables(variables: Mapping[str, Any], taken_too: Iterable[str] = ()) -> None:
    """Refuse template variables that pretend to be fields of the request.

    Args:
        variables: `chat_template_kwargs` of a request.
        taken_too: more names that they must not have.

    Raises:
        InvalidRequestError: a name is taken.
    """
    if taken := sorted(variables.keys() & _RESERVED.union(taken_too)):
        raise InvalidRequestError(
            f"chat_template_kwargs must not set {', '.join(taken)}", "chat_template_kwargs"
        )


# ----------------------------------------------------------------------------------- messages


def _plain(value: Any, where: str, mark: Mark, depth: int = 0) -> Any:
    """A copy made of plain JSON values: other objects have methods that a template could call. Its
    texts are marked."""
    if depth > MAX_MESSAGE_DEPTH:
        raise InvalidRequestError(f"{where} is nested over {MAX_MESSAGE_DEPTH} levels deep", where)
    match value:
        case None | bool():
            return value
        case str():
            return mark(str.__str__(value))
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {
                _plain(str(key), where, mark): _plain(item, where, mark, depth + 1)
                for key, item in value.items()
            }
        case list() | tuple():
            return [_plain(item, where, mark, depth + 1) for item in value]
        case _:
            raise InvalidRequestError(f"{where} must not hold a {type(value).__name__}", where)


def _check_parts(parts: Sequence[Any], where: str) -> None:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidRequestError(f"{where} must hold objects with a type", where)
        if part["type"] != "text":
            raise UnsupportedFieldError(f"{where}: {part['type']} is not supported, text is", where)
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where} must have text in its text parts", where)


def _mark_end(message: dict[str, Any]) -> None:
    """Add the mark to the text that is to be continued."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CUT_MARK
    elif isinstance(content, list) and content:
        content[-1]["text"] += _CUT_MARK
    else:
        raise InvalidRequestError(
            "continue_final_message needs content in the last message", "continue_final_message"
        )


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(_CUT_HERE)
    if not mark:
        raise InvalidRequestError(
            "continue_final_message: this model's chat template leaves out the last message",
            "continue_final_message",
        )
    # A template that trims messages has taken the mark's space, and takes the message's own too.
    return before if after.startswith(" ") else before.rstrip()
