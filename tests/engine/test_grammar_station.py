"""Requests wait for their languages outside the scheduler, and leave once, whatever happens."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from engine.errors import InvalidRequestError, RaywireError, RequestFailedError
from engine.grammar.checker import Checker
from engine.grammar.compiler import Compiler
from engine.grammar.station import Station
from engine.request import Request, from_wire
from engine.structured_output import PARAM, StructuredOutput
from engine.wire import EngineCoreRequest
from tests.helpers.grammars import make_compiler, request_of, schema, spec
from tests.helpers.server import wait_for

TIMEOUT_S = 30.0


class Gate(Checker):
    """A checker that waits to be let on, and counts."""

    def __init__(self) -> None:
        super().__init__(cpu_s=TIMEOUT_S)
        self.is_open = threading.Event()
        self.checked: list[StructuredOutput] = []

    def check(self, output: StructuredOutput) -> int:
        self.checked.append(output)
        assert self.is_open.wait(TIMEOUT_S)
        return super().check(output)


class Waiting:
    """A station, and who has left it, how."""

    def __init__(self, compiler: Compiler, make_checker: Callable[[], Checker] = Checker) -> None:
        self.left: SimpleQueue[tuple[str, str, RaywireError | None]] = SimpleQueue()
        self.station = Station(
            compiler,
            put=lambda request: self.left.put((request.request_id, "put", None)),
            refuse=lambda request, error: self.left.put((request.request_id, "refuse", error)),
            end=lambda request: self.left.put((request.request_id, "end", None)),
            make_checker=make_checker,
        )

    def submit(self, *messages: EngineCoreRequest) -> list[Request]:
        requests = [
            from_wire(message, max_model_len=999, block_size=16, is_cached=False)
            for message in messages
        ]
        for request in requests:
            self.station.submit(request)
        return requests

    def take(self, count: int = 1) -> list[tuple[str, str, RaywireError | None]]:
        return [self.left.get(timeout=TIMEOUT_S) for _ in range(count)]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.is_open.set()


@pytest.fixture
def waiting(tmp_path: Path, gate: Gate) -> Iterator[Waiting]:
    waiting = Waiting(make_compiler(tmp_path), lambda: gate)
    yield waiting
    gate.is_open.set()
    waiting.station.close()


def test_a_request_leaves_with_its_matcher_when_its_language_is_compiled(
    waiting: Waiting, gate: Gate
) -> None:
    """The first waits; the next of the same language does not, and nothing is compiled twice."""
    output = schema({"type": "integer"})
    (first,) = waiting.submit(request_of(output, request_id="first"))
    assert waiting.left.empty()
    gate.is_open.set()
    assert waiting.take() == [("first", "put", None)]
    (second,) = waiting.submit(request_of(output, request_id="second"))
    assert waiting.left.get_nowait() == ("second", "put", None)
    assert first.matcher is not None
    assert second.matcher is not None
    assert first.matcher is not second.matcher
    assert gate.checked == [output]


def test_all_requests_of_one_language_wait_for_one_compilation(
    waiting: Waiting, gate: Gate
) -> None:
    """As the copies of a prompt do."""
    output = schema({"type": "boolean"})
    waiting.submit(*(request_of(output, request_id=str(i)) for i in range(5)))
    gate.is_open.set()
    assert sorted(waiting.take(5)) == [(str(i), "put", None) for i in range(5)]
    assert gate.checked == [output]
    assert waiting.station.num_waiting == 0


def test_a_request_that_is_aborted_while_it_waits_ends_once(waiting: Waiting, gate: Gate) -> None:
    """At once, and it never comes to the scheduler; others of its language do."""
    output = schema({"type": "null"})
    waiting.submit(request_of(output, request_id="gone"), request_of(output, request_id="stays"))
    waiting.station.abort(["gone", "unknown"])
    assert waiting.take() == [("gone", "end", None)]
    waiting.station.abort(["gone"])
    gate.is_open.set()
    assert waiting.take() == [("stays", "put", None)]
    waiting.station.abort(["gone", "stays"])
    assert waiting.left.empty()


def test_what_cannot_be_compiled_is_refused_and_remembered(waiting: Waiting, gate: Gate) -> None:
    """With the field's name; asking again costs nothing."""
    gate.is_open.set()
    output = schema({"type": "banana"})
    waiting.submit(request_of(output, request_id="first"))
    ((name, how, error),) = waiting.take()
    assert (name, how) == ("first", "refuse")
    assert isinstance(error, InvalidRequestError)
    assert (str(error), error.param) == ("json_schema: Invalid type: banana", PARAM)
    waiting.submit(request_of(output, request_id="again"))
    name, how, error = waiting.left.get_nowait()
    assert (name, how, str(error)) == ("again", "refuse", "json_schema: Invalid type: banana")
    assert len(gate.checked) == 1


def test_each_request_follows_its_own_output(waiting: Waiting, gate: Gate) -> None:
    """Of one language: one goes on where another engine has left off, one has output that does not
    fit."""
    gate.is_open.set()
    output = spec("choice", '["abc"]')
    waiting.submit(
        request_of(output, request_id="whole"),
        request_of(output, request_id="half", output=list(b"ab")),
        request_of(output, request_id="wrong", output=list(b"x")),
    )
    left = {name: (how, error) for name, how, error in waiting.take(3)}
    assert {name: how for name, (how, _) in left.items()} == {
        "whole": "put",
        "half": "put",
        "wrong": "refuse",
    }
    assert isinstance(left["wrong"][1], InvalidRequestError)


def test_one_language_that_takes_long_does_not_hold_up_the_next(tmp_path: Path) -> None:
    """There is another thread."""
    gates = [Gate(), Gate()]
    gates[1].is_open.set()
    waiting = Waiting(make_compiler(tmp_path), iter(gates).__next__)
    waiting.submit(request_of(schema({"type": "array"}), request_id="a"))
    waiting.submit(request_of(schema({"type": "string"}), request_id="b"))
    try:
        # Whichever thread was first, the open one takes what is there.
        (name, how, _), *_ = waiting.take()
        assert how == "put"
        assert waiting.station.num_waiting == 1
        gates[0].is_open.set()
        assert {name, *(name for name, _, _ in waiting.take())} == {"a", "b"}
    finally:
        gates[0].is_open.set()
        waiting.station.close()


def test_what_nobody_waits_for_any_more_is_not_compiled(tmp_path: Path) -> None:
    """A client that sends endless languages and leaves holds up nobody for longer than those that
    are compiled already."""
    gates = [Gate(), Gate()]
    waiting = Waiting(make_compiler(tmp_path), iter(gates).__next__)
    wanted = [schema({"const": each}) for each in ("a", "b", "c")]
    try:
        waiting.submit(*(request_of(each, request_id=each.spec) for each in wanted[:2]))
        wait_for(lambda: all(gate.checked for gate in gates), "both threads are at work")
        for i in range(100):
            waiting.submit(request_of(schema({"const": i}), request_id=str(i)))
            waiting.station.abort([str(i)])
        assert waiting.take(100) == [(str(i), "end", None) for i in range(100)]
        waiting.submit(request_of(wanted[2], request_id=wanted[2].spec))
        for gate in gates:
            gate.is_open.set()
        assert {name for name, _, _ in waiting.take(3)} == {each.spec for each in wanted}
        assert sum(len(gate.checked) for gate in gates) == len(wanted)
    finally:
        for gate in gates:
            gate.is_open.set()
        waiting.station.close()


def test_a_fault_of_ours_fails_the_request_and_not_the_thread(
    waiting: Waiting, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one is compiled."""
    gate.is_open.set()
    check = gate.check
    gate.check = lambda output: 1 // 0  # type: ignore[method-assign]
    waiting.submit(request_of(schema({"type": "array"}), request_id="unlucky"))
    ((_, how, error),) = waiting.take()
    assert how == "refuse"
    assert isinstance(error, RequestFailedError)
    assert "ZeroDivisionError" in caplog.text
    gate.check = check  # type: ignore[method-assign]
    waiting.submit(request_of(schema({"type": "array"}), request_id="lucky"))
    assert waiting.take() == [("lucky", "put", None)]


def test_closing_starts_no_process(waiting: Waiting, gate: Gate) -> None:
    """For what is just about to be compiled; and that this fails is no news."""
    waiting.submit(request_of(schema({"type": "array"})))
    wait_for(lambda: gate.checked, "the thread is at work")
    waiting.station.close()
    with pytest.raises(RequestFailedError):
        Checker.check(gate, schema({"type": "string"}))
    assert gate._process is None


def test_closing_leaves_no_process(waiting: Waiting, gate: Gate) -> None:
    """Also while something is compiled."""
    gate.is_open.set()
    waiting.submit(request_of(schema({"type": "array"})))
    waiting.take()
    process = gate._process
    assert process is not None
    waiting.station.close()
    assert process.wait(TIMEOUT_S) < 0
