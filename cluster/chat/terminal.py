"""Reads messages from standard input and writes answers to standard output as they come.

Ctrl-C ends the answer that is being written, and the connection with it, so that the server stops
too. Ctrl-D ends the program.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from cluster.api_client import AnswerError, ApiClient
from cluster.chat.conversation import Conversation
from engine.errors import EXIT_FAILED

EXIT_INTERRUPTED = 130

_PROMPT = "> "
_HARMLESS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - set(b"\n\t"))
"""Deletes what would move a terminal's cursor, set its title, or worse: the text is not ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkSettings:
    """The flags of both commands."""

    url: str
    api_key: str | None
    model: str | None
    """None: the first that is served."""
    quick: str | None
    """The only message; None: they are read from standard input."""
    has_stats: bool
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """More fields of each request."""


def talk(conversation: Conversation, settings: TalkSettings) -> int:
    """Send messages and show the answers until there are no more. Main thread only.

    Returns:
        The exit code: 0; of the only message 1 if its answer failed, 130 if it was interrupted.

    Raises:
        ConfigError: no server answers at the URL.
    """
    with asyncio.Runner() as runner:
        client = runner.run(_connect(settings))
        try:
            model = settings.model or runner.run(client.first_model())
            talker = _Talker(runner, client, conversation, settings, model)
            if settings.quick is not None:
                return talker.say(settings.quick)
            if sys.stdin.isatty():
                click.echo(f"{model} at {client.base_url}; Ctrl-C ends an answer, Ctrl-D all")
            for message in _messages():
                talker.say(message)
            return 0
        finally:
            runner.run(client.close())


async def _connect(settings: TalkSettings) -> ApiClient:
    return ApiClient(settings.url, settings.api_key)  # needs a running loop


def _messages() -> Iterator[str]:
    """Lines that are not empty. On a terminal with a prompt, and the keys for editing."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # `input` uses it once it is loaded
    while True:
        try:
            message = input(_PROMPT if is_terminal else "")
        except KeyboardInterrupt:
            click.echo()  # the line is dropped, as in a shell
            continue
        except EOFError:
            if is_terminal:
                click.echo()
            return
        if message.strip():
            yield message


class _Talker:
    """Sends one message after the other."""

    def __init__(
        self,
        runner: asyncio.Runner,
        client: ApiClient,
        conversation: Conversation,
        settings: TalkSettings,
        model: str,
    ) -> None:
        self._runner = runner
        self._client = client
        self._conversation = conversation
        self._fields = {**settings.sampling, "model": model}
        self._has_stats = settings.has_stats
        if settings.has_stats:
            self._fields["stream_options"] = {"include_usage": True}

    def say(self, message: str) -> int:
        """Send `message` and write the answer. Returns the exit code that it is worth."""
        answer = _Answer()
        message = message.encode(errors="replace").decode()  # it may hold bytes that are no UTF-8
        body = {**self._fields, **self._conversation.ask(message)}
        try:
            self._runner.run(self._write_answer(body, answer))
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except AnswerError as error:
            answer.break_line()
            click.echo(f"error: {error}", err=True)
            return EXIT_FAILED
        finally:
            answer.break_line()
            self._conversation.end(answer.text)
        if self._has_stats:
            click.echo(answer.stats(), err=True)
        return 0

    async def _write_answer(self, body: Mapping[str, Any], answer: "_Answer") -> None:
        async for event in self._client.stream(self._conversation.path, body):
            answer.think(event.reasoning)
            answer.speak(event.text)
            if event.usage is not None:
                answer.num_tokens = event.usage.completion_tokens


class _Answer:
    """One answer on standard output."""

    def __init__(self) -> None:
        self.text = ""
        """What was said, without what was thought."""
        self.num_tokens = 0
        self._began_s = time.perf_counter()
        self._first_s: float | None = None
        self._is_thinking = False
        self._ends_line = True

    def think(self, text: str) -> None:
        if text:
            if not self._is_thinking:
                self._write("<think>\n")
            self._is_thinking = True
            self._write(text)

    def speak(self, text: str) -> None:
        if text:
            if self._is_thinking:
                self._write("\n</think>\n")
            self._is_thinking = False
            self.text += text
            self._write(text)

    def break_line(self) -> None:
        """End the line, if there is anything in it."""
        if not self._ends_line:
            self._write("\n")

    def stats(self) -> str:
        """vLLM's two figures: seconds to the first text, and tokens a second over all."""
        whole_s = time.perf_counter() - self._began_s
        first_s = whole_s if self._first_s is None else self._first_s
        return (
            f"TTFT: {1000 * first_s:.2f} ms\n"
            f"TPS:  {self.num_tokens / whole_s:.2f} tokens/s"
            f" ({self.num_tokens} tokens in {whole_s:.2f}s)"
        )

    def _write(self, text: str) -> None:
        if self._first_s is None:
            self._first_s = time.perf_counter() - self._began_s
        if sys.stdout.isatty():
            text = text.translate(_HARMLESS)
        click.echo(text, nl=False)
        self._ends_line = text.endswith("\n")
