"""Where chat templates run: Jinja's immutable sandbox with transformers' additions, bounded in time
and in what is written. Used by `chat_template`.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, runtime, sandbox, utils
from jinja2.parser import Parser

from api.limits import MAX_RENDER_S, MAX_RENDERED_CHARS, MAX_TEMPLATE_BITS
from engine.errors import ConfigError

_deadline: ContextVar[float] = ContextVar("template_deadline", default=math.inf)


class _GenerationTag(ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's own words, for training. Here it
    changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(utils.Namespace):
    """Jinja's, without names that begin with an underscore: Python's own live there."""

    def __init__(*args: Any, **variables: Any) -> None:
        self, *rest = args  # a template may well have a variable called self
        attributes = dict(*rest, **variables)
        for name in attributes:
            _refuse_underscore(name)
        utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _BoundedLoop:
    """What a template loops over, with a look at the clock in each round."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError is what Jinja expects then

    def __iter__(self) -> Iterator[Any]:
        deadline = _deadline.get()
        for item in self._items:
            if time.monotonic() > deadline:
                raise jinja2.TemplateRuntimeError(
                    f"the chat template took over {MAX_RENDER_S:.0f} s on these messages"
                )
            yield item


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """Jinja's, with products and powers bounded: one operation of Python cannot be interrupted, and
    `9 ** 9 ** 9` would hold up all of the process."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if not _is_small(operator, left, right):
            raise jinja2.TemplateRuntimeError(f"the chat template makes too much of one {operator}")
        return super().call_binop(context, operator, left, right)


def _is_small(operator: str, left: Any, right: Any) -> bool:
    """Whether a product or a power is no larger than a template may have any use for."""
    match operator, left, right:
        case "**", int(), int():
            return right * left.bit_length() <= MAX_TEMPLATE_BITS
        case "*", int(), int():
            return left.bit_length() + right.bit_length() <= MAX_TEMPLATE_BITS
        case "*", int(), str() | list() | tuple():
            return left * len(right) <= MAX_RENDERED_CHARS
        case "*", str() | list() | tuple(), int():
            return len(left) * right <= MAX_RENDERED_CHARS
    return True


def make_environment() -> sandbox.ImmutableSandboxedEnvironment:
    """What templates find: transformers' additions to Jinja."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
    )
    environment.filters |= {"tojson": _to_json, "bounded_loop": _BoundedLoop}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": lambda *args, **items: dict(*args, **items),
        "namespace": _Namespace,
    }
    return environment


def compile_template(
    environment: sandbox.ImmutableSandboxedEnvironment, name: str, source: str
) -> jinja2.Template:
    """Compile a template with each of its loops bounded. Raises ConfigError."""
    try:
        tree = environment.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "bounded_loop", [], [], None, None)
        code = environment.compile(tree, filename=f"chat template {name}")
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the model's chat template ({name}) is no valid Jinja: line {error.lineno}:"
            f" {error.message}"
        ) from error
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text that a template makes of variables, of plain data.

    Raises:
        jinja2.TemplateError: it refuses them, or takes too long or writes too much.
    """
    token = _deadline.set(min(_deadline.get(), time.monotonic() + MAX_RENDER_S))
    try:
        return _join(template.generate(variables))
    finally:
        _deadline.reset(token)


@contextlib.contextmanager
def shared_time() -> Iterator[None]:
    """All that is rendered in the block has the time of one rendering.

    Raises:
        ConfigError: it took longer.
    """
    deadline = time.monotonic() + MAX_RENDER_S
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)
    if time.monotonic() > deadline:
        raise ConfigError(f"it takes over {MAX_RENDER_S:.0f} s to try it out")


def _join(pieces: Iterable[str]) -> str:
    """The pieces of a rendered template as one text, unless it grows too long."""
    text: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise jinja2.TemplateRuntimeError(
                f"the chat template wrote over {MAX_RENDERED_CHARS} characters for these messages"
            )
        text.append(piece)
    return "".join(text)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a model reads it: Jinja's own filter escapes characters for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not hold {name!r}")
