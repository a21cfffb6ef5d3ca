"""Languages that are broken, monstrous or endless: refused in time, and nobody dies of them."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import InvalidRequestError, RequestFailedError, UnsupportedFieldError
from engine.grammar.checker import Checker
from engine.grammar.compiler import Compiler, Grammar
from engine.limits import MAX_SPEC_BYTES
from engine.structured_output import PARAM, Kind, StructuredOutput
from tests.helpers.grammars import checker, make_compiler, request_of, schema, spec, started

TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def hasty() -> Iterator[Checker]:
    checker = Checker(cpu_s=TIMEOUT_S)
    yield checker
    checker.close()


def nested_lists(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def chain(count: int, rule: str, name: str = "r") -> str:
    """Rules of which each needs the next."""
    rules = (rule.format(f"{name}{i}", f"{name}{i + 1}") for i in range(count))
    return "\n".join([f"start: {name}0", *rules, f'{name}{count}: "y"'])


BROKEN: list[tuple[Kind, str, str]] = [
    ("json_schema", "{", "EOF while parsing"),
    ("json_schema", "[]", "object"),
    ("json_schema", '"text"', "object"),
    ("json_schema", "NaN", "line 1"),
    ("json_schema", "false", "object"),
    ("json_schema", '{"type": "banana"}', "Invalid type: banana"),
    ("json_schema", '{"properties": {"a": "string"}}', "schema must be an object or boolean"),
    ("json_schema", '{"$ref": "#/$defs/nowhere"}', "does not exist"),
    ("json_schema", '{"$ref": "https://example.com/a.json"}', "retrieving it failed"),
    ("json_schema", '{"$ref": "#"}', "no text at all would be valid"),
    ("json_schema", '{"not": {"type": "string"}}', "not cannot be enforced"),
    ("json_schema", '{"type": "string", "pattern": "("}', "regular expression"),
    ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "Unsatisfiable"),
    ("json_schema", '{"enum": []}', ": ."),
    ("regex", "(", "unclosed group"),
    ("regex", "a(?=b)", "look-around"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", "a{5,2}", "repetition"),
    ("choice", "[]", "1 to 4096"),
    ("choice", "{}", "array of texts"),
    ("choice", "[1]", "array of texts"),
    ("choice", json.dumps(["a"] * 5000), "1 to 4096"),
    ("lark", "nonsense", "nonsense"),
    ("lark", 'start: "a', "lexer error"),
    ("lark", "start: nobody", "unknown name"),
    ("lark", "start: start", "no text at all would be valid"),
    ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
]


@pytest.mark.row("S-23")
@pytest.mark.parametrize(("kind", "text", "why"), BROKEN)
def test_what_is_broken_is_refused_with_a_reason(kind: Kind, text: str, why: str) -> None:
    """F01: in one short line that names the kind, at the field."""
    with pytest.raises(InvalidRequestError, match=why) as caught:
        checker().check(spec(kind, text))
    message = str(caught.value)
    assert message.startswith(f"{kind}: ")
    assert "\n" not in message
    assert len(message) < 500
    assert caught.value.param == PARAM


@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice", "lark"])
def test_what_is_empty_or_too_long_is_refused_before(kind: Kind) -> None:
    """F04: it does not even travel."""
    for text in ("", "  \n", "x" * (MAX_SPEC_BYTES + 1)):
        with pytest.raises(InvalidRequestError):
            StructuredOutput(kind, text)


MONSTROUS: list[tuple[Kind, str]] = [
    ("json_schema", nested_lists(100)),
    ("json_schema", nested_lists(10_000)),
    ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(5000)}})),
    ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(15_000)]})),
    (
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {n + str(i): {"type": "string"}}} for n in "ab"]}
                    for i in range(24)
                ]
            }
        ),
    ),
    (
        "json_schema",
        json.dumps(
            {
                "$defs": {
                    f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
                    for i in range(4000)
                }
                | {"d4000": {}},
                "$ref": "#/$defs/d0",
            }
        ),
    ),
    (
        "json_schema",
        json.dumps(
            {
                "$defs": {
                    "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]},
                    "b": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
                },
                "$ref": "#/$defs/a",
            }
        ),
    ),
    ("json_schema", '{"type": "array", "minItems": 1000000000}'),
    ("json_schema", '{"type": "string", "minLength": 1000000, "maxLength": 100000000}'),
    ("json_schema", '{"type": "integer", "multipleOf": 999999937}'),
    ("json_schema", '{"type": "number", "minimum": -1e308, "maximum": 1e308}'),
    ("json_schema", '{"type": "string", "pattern": "(((a{1,500}){1,500}){1,500}){1,500}b"}'),
    ("regex", "(" * 50_000 + "a" + ")" * 50_000),
    ("regex", "((((a{100}){100}){100}){100})"),
    ("regex", "(.*a){500}"),
    ("regex", "[ab]*a[ab]{60}"),
    ("regex", "|".join(rf"\w{{{i}}}" for i in range(1, 300))),
    ("regex", "a" * 200_000),
    ("regex", "|".join(f"x{i}" for i in range(30_000))),
    ("lark", chain(8000, '{0}: {1} {1} | "x"')),
    ("lark", chain(8000, '{0}: {1} "x"')),
    ("lark", chain(10_000, '{0}: {1} "x"', "R")),
    ("lark", chain(25, "{0}: {1} {1}", "R")),
    ("lark", 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"'),
    ("lark", 'start: start start | "a" |'),
    ("lark", "start: A\nA: " + " & ".join(f"/(.*{chr(97 + i)}.*)/" for i in range(26))),
]


@pytest.mark.row("S-26")
@pytest.mark.parametrize(("kind", "text"), MONSTROUS, ids=range(len(MONSTROUS)))
def test_what_is_monstrous_is_compiled_or_refused_in_time(
    kind: Kind, text: str, hasty: Checker
) -> None:
    """Whatever it does to the process that compiles it, which is there again for the next."""
    began = time.monotonic()
    with contextlib.suppress(InvalidRequestError):
        hasty.check(spec(kind, text))
    took_s = time.monotonic() - began
    assert took_s < TIMEOUT_S + 5.0  # it may have had to start again, on a crowded machine
    # It says by how much its memory grew: not at all where the last one has left some.
    assert hasty.check(schema({"type": "integer"})) >= 0


class Disturbed(Checker):
    """One whose process gets a signal before each grammar."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(cpu_s=0.05)
        self._signum = signum

    def _send(self, process: "subprocess.Popen[bytes]", body: bytes) -> None:
        process.send_signal(self._signum)
        super()._send(process, body)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_what_befalls_the_process_is_no_fault_of_a_grammar(
    tmp_path: Path, signum: signal.Signals
) -> None:
    """Killed, or kept from running, it fails one request, which may come again; a fault of the
    grammar's would have been remembered."""
    compiler = make_compiler(tmp_path)
    output = schema({"type": "integer"})
    with contextlib.closing(Disturbed(signum)) as disturbed:
        with pytest.raises(RequestFailedError):
            compiler.compile(output, disturbed)
    assert compiler.compile(output, checker()) is compiler.known(output)


@pytest.mark.row("S-26")
def test_the_cache_of_grammars_is_bounded_in_bytes(tmp_path: Path) -> None:
    """The least recently used go first; ten thousand errors are no more than so many bytes."""
    compiler = make_compiler(tmp_path, max_cache_bytes=1_000_000)
    outputs = [spec("choice", json.dumps([f"text {i}"])) for i in range(30)]
    for output in outputs:
        compiler.compile(output, checker())
        compiler.known(outputs[0])
        assert compiler.num_cached_bytes <= 1_000_000
    assert compiler.known(outputs[0]) is not None
    assert compiler.known(outputs[1]) is None
    assert compiler.known(outputs[-1]) is not None
    for i in range(2000):
        error = InvalidRequestError("no")
        compiler._keep(spec("regex", f"({i}"), error)
    assert compiler.num_cached_bytes <= 1_000_000
    assert len(compiler._known) < 1000


@pytest.mark.row("S-26")
def test_a_grammar_that_grows_makes_others_leave(tmp_path: Path) -> None:
    """States that were found on the way are counted, by the time it took to find them."""
    compiler = make_compiler(tmp_path, max_cache_bytes=2_000_000)
    first, second = spec("regex", "a+"), spec("regex", "b+")
    grammar = compiler.compile(first, checker())
    compiler.compile(second, checker())
    grammar.note_growth(0.1)
    assert compiler.known(first) is grammar
    assert compiler.num_cached_bytes > 2_000_000
    compiler.compile(spec("regex", "c+"), checker())
    assert compiler.known(first) is None
    assert compiler.num_cached_bytes <= 2_000_000


def test_a_grammar_without_room_for_more_states_is_compiled_anew(tmp_path: Path) -> None:
    """Else one request that has filled it up would be the end of all to come."""
    compiler = make_compiler(tmp_path)
    output = spec("regex", "a+")
    grammar: Grammar = compiler.compile(output, checker())
    grammar.note_spent()
    assert compiler.known(output) is None
    assert compiler.compile(output, checker()) is not grammar


def test_a_tokenizer_that_cannot_be_followed_refuses_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request, without reading the file each time."""
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}})
    )
    compiler = Compiler(tmp_path, 1)
    for text in ("a+", "b+"):
        with pytest.raises(UnsupportedFieldError, match="tokenizer"):
            compiler.compile(spec("regex", text), checker())
    assert len(caplog.records) == 1


def test_a_schema_of_any_size_that_people_write_is_compiled(tmp_path: Path) -> None:
    """Hundreds of properties, enumerations, nesting, references, recursion."""
    node = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    }
    large = {
        "type": "object",
        "properties": {
            **{f"field_{i}": {"type": "string", "description": "x" * 50} for i in range(300)},
            "kind": {"enum": [f"kind {i}" for i in range(500)]},
            "tree": {"$ref": "#/$defs/node"},
        },
        "required": [f"field_{i}" for i in range(100)],
        "$defs": {"node": node},
    }
    compiler = make_compiler(tmp_path)
    request = started(compiler, request_of(schema(large)))
    assert request.matcher is not None
    assert request.matcher.accept(ord("{"))


def test_a_process_that_never_starts_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request is told; of the attempts number 1, 2, 4, 8, … are logged, with the cause."""
    monkeypatch.setattr("engine.grammar.checker._MODULE", "engine.grammar.nothing")
    lonely = Checker()
    for _ in range(5):
        with pytest.raises(RequestFailedError, match="cannot be compiled now"):
            lonely.check(spec("regex", "a"))

    logged = [each for each in caplog.records if "no process to compile" in each.message]
    assert [each.message.partition("=")[2] for each in logged] == ["1", "2", "4"]
    assert all(each.exc_info for each in logged)


def test_a_process_that_cannot_even_be_forked_is_the_requests_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where there are no more processes to be had; the next request tries again."""

    def no_more(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    lonely = Checker()
    with monkeypatch.context() as patch:
        patch.setattr("engine.leash.start_module", no_more)
        for _ in range(3):
            with pytest.raises(RequestFailedError, match="cannot be compiled now"):
                lonely.check(spec("regex", "a"))

    assert sum("no process to compile" in each.message for each in caplog.records) == 2
    assert lonely.check(spec("regex", "a")) > 0
    lonely.close()
