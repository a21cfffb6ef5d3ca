"""Calls under way: who still owes a reply, and which future gets it."""

import numpy as np
import pytest

from engine.errors import ExecutorError, RequestFailedError, WireError
from engine.step import ModelRunnerOutput, WorkerReport
from tests.helpers.fake_worker import make_plan
from workers import rpc
from workers.pending_calls import PendingCalls


def report(rank: int) -> WorkerReport:
    return WorkerReport(rank, "float32", 10, 20, 30, 40)


def output(step: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(step, [], np.zeros(0, dtype="<u4"))


def test_all_ranks_replies_make_a_list_by_rank() -> None:
    """Whatever the order in which they come."""
    pending = PendingCalls()
    future = pending.add(rpc.load, 0, [0, 1], 10.0).future
    pending.accept(1, rpc.Loaded(0, report(1)))
    assert not future.done()
    pending.accept(0, rpc.Loaded(0, report(0)))
    assert future.result(timeout=0) == [report(0), report(1)]


def test_futures_are_resolved_in_the_order_of_the_calls() -> None:
    """A reply that is early waits for those before it."""
    pending = PendingCalls()
    done: list[int] = []
    load = pending.add(rpc.load, 0, [0, 1], 10.0).future
    step = pending.add(rpc.execute_model(make_plan(1), 0), 1, [0], 10.0).future
    load.add_done_callback(lambda _: done.append(0))
    step.add_done_callback(lambda _: done.append(1))
    pending.accept(0, rpc.Loaded(0, report(0)))
    pending.accept(0, rpc.Executed(1, output(1)))
    assert done == []
    pending.accept(1, rpc.Loaded(0, report(1)))
    assert done == [0, 1]


@pytest.mark.parametrize(
    ("rank", "reply"),
    [
        (0, rpc.Executed(1, output(1))),  # no such call
        (1, rpc.Executed(0, output(1))),  # not this rank
        (0, rpc.Loaded(0, report(0))),  # not this method
    ],
)
def test_reply_nobody_asked_for_breaks_the_protocol(rank: int, reply: rpc.Reply) -> None:
    """Wrong number, rank or method."""
    pending = PendingCalls()
    pending.add(rpc.execute_model(make_plan(1), 0), 0, [0], 10.0)
    with pytest.raises(WireError):
        pending.accept(rank, reply)


def test_refusal_of_one_rank_fails_the_call_only() -> None:
    """The others' replies are taken, and the next call is not touched."""
    pending = PendingCalls()
    refused = pending.add(rpc.profile(True, "/x"), 0, [0, 1], 10.0).future
    following = pending.add(rpc.execute_model(make_plan(1), 0), 1, [0], 10.0).future
    pending.accept(0, rpc.Refused(0, "no such folder"))
    pending.accept(1, rpc.Profiled(0, None))
    with pytest.raises(RequestFailedError, match="profile: no such folder"):
        refused.result(timeout=0)
    pending.accept(0, rpc.Executed(1, output(1)))
    assert following.result(timeout=0).step == 1


def test_failure_fails_what_is_under_way_and_what_is_to_come() -> None:
    """With the first error, whatever comes later."""
    pending = PendingCalls()
    before = pending.add(rpc.load, 0, [0], 10.0).future
    pending.fail(ExecutorError("first"))
    pending.fail(ExecutorError("second"))
    after = pending.add(rpc.statistics, 1, [0], 10.0).future
    for future in (before, after):
        with pytest.raises(ExecutorError, match="first"):
            future.result(timeout=0)
    assert pending.oldest() is None


def test_calls_cannot_be_cancelled() -> None:
    """The workers' work cannot be taken back, so a future does not pretend."""
    future = PendingCalls().add(rpc.load, 0, [0], 10.0).future
    assert not future.cancel()
