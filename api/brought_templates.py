"""Chat templates that come with requests, where the server trusts its clients. Used by
`conversation`, in place of the model's own template.

Such a template is a program like the model's own: sandboxed, and stopped when it runs too long.
Compiling it and trying it out takes some milliseconds, so the last few are kept.
"""

from api import template_sandbox
from api.chat_template import ChatTemplate
from api.limits import MAX_TEMPLATE_CHARS
from api.tokenizer import Tokenizer
from engine.errors import ConfigError, InvalidRequestError

MAX_KEPT = 8


class BroughtTemplates:
    """The last few. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: dict[str, ChatTemplate] = {}

    def get(self, source: str, tokenizer: Tokenizer) -> ChatTemplate:
        """The template with that text.

        Raises:
            InvalidRequestError: it is no valid Jinja, or too long.
        """
        found = self._kept.get(source)
        if found is None:
            found = _compile(source, tokenizer)
            # Two threads may do the same; the later one wins, and either is right.
            kept = list(self._kept.items())[1 - MAX_KEPT :]
            self._kept = dict([*kept, (source, found)])
        return found


def _compile(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    name = "chat_template"
    if len(source) > MAX_TEMPLATE_CHARS:
        raise InvalidRequestError(
            f"{name} has {len(source)} characters; {MAX_TEMPLATE_CHARS} are the most", name
        )
    try:
        with template_sandbox.shared_time():  # it is tried out with several conversations
            return ChatTemplate.load(tokenizer, source, name)
    except ConfigError as error:
        raise InvalidRequestError(f"{name}: {error}", name) from error
