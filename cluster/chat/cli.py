"""The commands `raywire chat` and `raywire complete`, with vLLM's flags. Light, as `cluster/cli.py`
is."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from cluster.chat.conversation import Conversation

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = [
    click.option(
        "--url",
        default="http://127.0.0.1:8000",
        show_default=True,
        help="Of the server, with or without /v1.",
    ),
    click.option(
        "--model", "--model-name", "model", help="Name in the API; unless given, the first served."
    ),
    click.option(
        "--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Where one is asked."
    ),
    click.option("-q", "--quick", metavar="MESSAGE", help="Send this, write the answer, and end."),
    click.option("--max-tokens", type=click.IntRange(min=1), help="Of each answer."),
    click.option("--temperature", type=click.FloatRange(min=0), help="Of each answer."),
    click.option("--stats", "has_stats", is_flag=True, help="Time to first token, and rate."),
]


class _Command(click.Command):
    """Tells whoever leaves out the option before a message that there is one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            raise click.UsageError(f"{error.message}: -q 'MESSAGE' sends one", ctx) from error


def _with_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(cls=_Command)
@_with_options
@click.option("--system-prompt", help="What the model is told before all.")
def chat(system_prompt: str | None, **flags: Any) -> None:
    """Chat with the model of a running server.

    The answer is written as it comes, and each message goes with all that was said before. Ctrl-C
    ends an answer, Ctrl-D the program. Lines from a pipe are messages too.

    \b
    Examples:
      raywire chat
      raywire chat --url http://10.0.0.5:8000 --system-prompt 'Answer in verse.'
      raywire chat -q 'What is a ring buffer?' > answer.txt
    """
    from cluster.chat.conversation import Chat

    _talk(Chat(system_prompt), flags)


@click.command(cls=_Command)
@_with_options
def complete(**flags: Any) -> None:
    """Let the model of a running server go on with a text.

    For base models, which have not learnt to chat. Each prompt stands by itself.

    \b
    Examples:
      raywire complete --max-tokens 100
      raywire complete -q 'The sea is'
    """
    from cluster.chat.conversation import Completions

    _talk(Completions(), flags)


def _talk(conversation: "Conversation", flags: dict[str, Any]) -> None:
    # Only here: HTTP takes time that --help does not need.
    from cluster.chat.terminal import TalkSettings, talk

    names = ("max_tokens", "temperature")
    given = {name: flags.pop(name) for name in names}
    sampling = {name: value for name, value in given.items() if value is not None}
    sys.exit(talk(conversation, TalkSettings(sampling=sampling, **flags)))
