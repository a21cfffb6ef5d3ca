"""Requests with a structured output on the input thread: it never waits for one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.grammar.compiler import Compiler
from engine.inbox import Abort, Add
from engine.request import from_wire
from engine.wire import EngineCoreOutput, FinishReason
from tests.engine.test_io_threads import Input, context_and_peer
from tests.helpers.api_peer import ApiPeer
from tests.helpers.grammars import make_compiler, schema, spec

TIMEOUT_S = 30.0

ENDLESS = spec("lark", "\n".join(["start: R0", *(f'R{i}: R{i + 1} "x"' for i in range(3500))]))
"""Takes the whole of its time, or overflows the stack."""


@contextmanager
def running(folder: Path) -> Iterator[tuple[Input, ApiPeer]]:
    compiler: Compiler = make_compiler(folder)
    with context_and_peer() as (context, peer):
        threads = Input(context, peer, compiler=compiler)
        threads.prepare = lambda message: from_wire(
            message, max_model_len=999, block_size=16, is_cached=False
        )
        try:
            yield threads, peer
        finally:
            threads.thread.close()


def reply(threads: Input) -> EngineCoreOutput:
    client_index, outputs = threads.replies.get(timeout=TIMEOUT_S)
    assert client_index == 0
    (output,) = outputs.outputs
    assert outputs.finished_ids == [output.request_id]
    return output


def added(threads: Input) -> str:
    item = threads.inbox.get(timeout=TIMEOUT_S)
    assert isinstance(item, Add)
    bound = item.request.sampling_params.structured_output is not None
    assert (item.request.matcher is not None) == bound
    return item.request.request_id


@pytest.mark.row("F-40")
def test_a_request_comes_with_its_matcher_and_neighbours_before_it(tmp_path: Path) -> None:
    """What needs no compiling passes what does."""
    with running(tmp_path) as (threads, peer):
        peer.add("bound", structured_output=schema({"type": "integer"}))
        peer.add("free")
        assert added(threads) == "free"
        assert added(threads) == "bound"


def test_what_cannot_be_compiled_is_answered_as_the_clients_fault(tmp_path: Path) -> None:
    """With code and field, at once; and the next one is served."""
    with running(tmp_path) as (threads, peer):
        peer.add("r", structured_output=schema({"type": "banana"}))
        output = reply(threads)
        assert (output.request_id, output.finish_reason) == ("r", FinishReason.ERROR)
        details = output.details
        assert details is not None
        assert details.error == "json_schema: Invalid type: banana"
        assert (details.error_code, details.error_param) == ("invalid_value", "structured_outputs")
        peer.add("next", structured_output=schema({"type": "integer"}))
        assert added(threads) == "next"


def test_an_abort_ends_what_is_still_compiled(tmp_path: Path) -> None:
    """Once, from here; the core hears of it too, and of a request that it does not know."""
    with running(tmp_path) as (threads, peer):
        peer.add("r", structured_output=ENDLESS)
        peer.abort("r")
        output = reply(threads)
        assert (output.request_id, output.finish_reason) == ("r", FinishReason.ABORT)
        assert threads.inbox.get(timeout=TIMEOUT_S) == Abort(["r"])
        # Whatever comes of compiling it: nobody is told.
        peer.add("next", structured_output=schema({"type": "integer"}))
        assert added(threads) == "next"
        assert threads.replies.empty()
