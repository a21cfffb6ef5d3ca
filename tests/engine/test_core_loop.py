"""The loop between the queues, without process, threads or sockets."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from engine import core_loop, utility
from engine.config import EngineConfig, ModelConfig, SchedulerConfig, WireConfig
from engine.core import EngineCore
from engine.core_loop import CoreLoop
from engine.errors import ExecutorError, FencedError
from engine.inbox import (
    Abort,
    AbortQueue,
    Add,
    Call,
    ExecutorFailed,
    Fenced,
    Item,
    ThreadCrashed,
    Wave,
)
from engine.wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Phase,
    StartWave,
    UtilityCall,
    UtilityOutput,
)
from tests.helpers.api_peer import make_request
from tests.helpers.fake_executor import FakeExecutor

CONFIG = EngineConfig(
    model=ModelConfig(path="", model_type="scripted"),
    wire=WireConfig(request_addresses=("a", "b"), output_addresses=("a", "b"), epoch=5),
)


class EndingInbox(SimpleQueue[Item]):
    """Calls `when_idle` where the loop would sleep for ever."""

    when_idle: Callable[[], None]

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        if self.empty():
            self.when_idle()
        return super().get(block, timeout)


class Harness:
    """A loop with its queues, which ends when all it was given is done."""

    def __init__(
        self,
        executor: FakeExecutor | None = None,
        coordinator_index: int | None = None,
        ahead: bool = True,
    ) -> None:
        self.executor = executor or FakeExecutor()
        config = replace(CONFIG, scheduler=SchedulerConfig(async_scheduling=ahead))
        self.core = EngineCore(config, self.executor, num_dropped_messages=lambda: 17)
        self.inbox = EndingInbox()
        self.aborts: AbortQueue = SimpleQueue()
        self.sent: list[tuple[int, EngineCoreOutputs]] = []
        self.loop = CoreLoop(
            self.core,
            self.inbox,
            self.aborts,
            put=lambda client_index, outputs: self.sent.append((client_index, outputs)),
            engine_index=0,
            epoch=5,
            num_clients=2 if coordinator_index is None else 3,
            coordinator_index=coordinator_index,
        )
        self.inbox.when_idle = self.loop.stop

    def add(self, request_id: str, client_index: int = 0, **params: Any) -> None:
        message = make_request(request_id, client_index=client_index, **params)
        self.inbox.put(Add(self.core.prepare(message)))

    def run(self, *items: Item) -> list[EngineCoreOutput]:
        """Give the loop `items` and let it run until it is idle; returns all outputs."""
        for item in items:
            self.inbox.put(item)
        self.loop.run()
        return [output for _, message in self.sent for output in message.outputs]

    def answers(self, *calls: tuple[Any, ...]) -> list[UtilityOutput]:
        """Run utility calls of API server 1: each a method's name and its arguments."""
        self.run(*(Call(utility_call(method, *args)) for method, *args in calls))
        assert {client_index for client_index, _ in self.sent} == {1}
        return [message.utility for _, message in self.sent if message.utility is not None]


def utility_call(method: str, *args: object) -> UtilityCall:
    return UtilityCall(1, 99, method, msgspec.Raw(msgspec.msgpack.encode(args)))


def test_requests_run_to_their_ends() -> None:
    """What is added comes out at its own API server."""
    harness = Harness()
    harness.add("a", client_index=0, max_tokens=2)
    harness.add("b", client_index=1, max_tokens=3)
    harness.run()

    assert [
        (client_index, output.request_id)
        for client_index, message in harness.sent
        for output in message.outputs
        if output.finish_reason is FinishReason.LENGTH
    ] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize(("ahead", "num_tokens"), [(False, 3), (True, 2)])
def test_aborts_are_drained_right_after_the_forward_pass(ahead: bool, num_tokens: int) -> None:
    """A request that is aborted during a step gets no token of it, though the ordered queue holds
    a hundred messages before its abort; nor of one that was planned ahead."""
    harness = Harness(ahead=ahead)

    def sample(request_id: str, index: int) -> int:
        if index == 3:  # while the fourth forward pass runs
            harness.aborts.put(["r"])
        return 100 + index

    harness.executor.script = sample
    harness.add("r", max_tokens=3000)
    outputs = harness.run()

    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert sum(len(output.new_token_ids) for output in outputs) == 4 * num_tokens
    assert len(harness.executor.plans) == 4


def test_an_abort_finds_a_request_that_still_waits_in_the_inbox() -> None:
    """The second queue comes too early for it; the ordered one does not."""
    harness = Harness()
    harness.aborts.put(["r"])
    harness.add("r", max_tokens=3000)
    outputs = harness.run(Abort(["r"]))

    assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
    assert not harness.executor.plans


def test_who_comes_while_a_step_runs_is_in_the_plan_that_is_made_ahead() -> None:
    """The loop looks for messages once more before that."""
    harness = Harness()

    def sample(request_id: str, index: int) -> int:
        if request_id == "old" and index == 0:
            harness.add("new", max_tokens=1)
        return 1

    harness.executor.script = sample
    harness.add("old", max_tokens=3)
    harness.run()

    assert [list(plan.num_scheduled_tokens) for plan in harness.executor.plans] == [
        ["old"],
        ["old", "new"],
        ["old"],
    ]


def test_aborts_do_not_pile_up_in_an_idle_core() -> None:
    """Without forward passes nobody drains the second queue, so the first does."""
    harness = Harness()
    for _ in range(10):
        harness.aborts.put(["unknown"])
        harness.inbox.put(Abort(["unknown"]))
    harness.run()

    assert harness.aborts.empty()


def test_an_idle_core_is_in_phase_idle() -> None:
    """Whatever it did last, heartbeats of a sleeping core have no age."""
    harness = Harness()
    harness.add("r")
    harness.run(Call(utility_call("statistics")), Wave(StartWave(1)))

    assert harness.core.phase is Phase.IDLE


def test_a_failed_executor_ends_the_loop_with_its_cause() -> None:
    """What the monitor has seen comes out as ExecutorError."""
    with pytest.raises(ExecutorError, match="worker 3 died"):
        Harness().run(ExecutorFailed("worker 3 died"))


def test_a_core_that_has_been_given_up_ends() -> None:
    """A word about an earlier incarnation is not for it."""
    with pytest.raises(FencedError, match="epoch 5"):
        Harness().run(Fenced(4), Fenced(5))


def test_a_crashed_thread_ends_the_loop_with_its_error() -> None:
    """The original error is the cause, so the traceback shows where."""
    error = ZeroDivisionError("boo")
    with pytest.raises(RuntimeError, match="input thread has crashed") as caught:
        Harness().run(ThreadCrashed("input", error))

    assert caught.value.__cause__ is error


# ------------------------------------------------------------------------------------- utilities


def test_statistics_hold_the_core_and_its_workers() -> None:
    """Counters of scheduler and workers, and the messages that the input thread has dropped."""
    (answer,) = Harness().answers(("statistics",))

    statistics = utility.read_answer("statistics", answer)
    assert statistics.scheduler.num_dropped_messages == 17
    assert [worker.pid for worker in statistics.workers] == [4711]


@pytest.mark.row("F-26", "S-50")
def test_every_other_name_is_refused() -> None:
    """Attributes of the core, of the loop, of the executor, private, inherited, or made up: each
    gets a failure, and nothing is called."""
    harness = Harness()
    names = {
        name for owner in (harness.core, harness.loop, harness.executor) for name in dir(owner)
    }
    names |= {"", "statistics ", "Statistics", "core.step", "__class__", "x" * 1000}
    refused = sorted(names - utility.METHODS.keys())
    answers = harness.answers(*((name,) for name in refused))

    assert len(answers) == len(refused) > 80
    assert all("no utility method" in str(answer.failure) for answer in answers)
    assert not harness.executor.is_closed


@pytest.mark.row("S-50")
def test_the_list_of_methods_is_what_the_design_says() -> None:
    """A longer list is a decision: it belongs into this test."""
    assert set(utility.METHODS) == {"statistics", "reset_prefix_cache", "profile", "drop_client"}


@pytest.mark.row("S-50")
@pytest.mark.parametrize(
    "call",
    [
        ("statistics", 1),
        ("profile",),
        ("profile", True),
        ("profile", 1, "folder"),
        ("profile", True, 5),
        ("profile", True, ""),
        ("profile", True, "x" * 2000),
        ("profile", True, "folder", "more"),
        ("reset_prefix_cache", None),
    ],
    ids=str,
)
def test_arguments_have_their_types(call: tuple[Any, ...]) -> None:
    """Too many, too few, or of another type: refused, and nothing is called."""
    harness = Harness()
    (answer,) = harness.answers(call)

    assert "wrong arguments" in str(answer.failure)
    assert not harness.executor.profiles


def test_the_prefix_cache_is_reset_between_requests_only() -> None:
    """While a request holds blocks the answer is False, afterwards True."""
    harness = Harness()

    def sample(request_id: str, index: int) -> int:
        if index == 0:
            harness.inbox.put(Call(utility_call("reset_prefix_cache")))
        return 1

    harness.executor.script = sample
    harness.add("r", max_tokens=3)
    harness.run()
    (during,) = [m.utility for _, m in harness.sent if m.utility is not None]
    (without,) = Harness().answers(("reset_prefix_cache",))

    assert utility.read_answer("reset_prefix_cache", during) is False
    assert utility.read_answer("reset_prefix_cache", without) is True


def test_the_profiler_starts_and_stops_once(tmp_path: Path) -> None:
    """Starting twice, stopping what does not run, and folders that cannot be written are refused
    before a worker hears of them."""
    folder = str(tmp_path)
    harness = Harness()
    answers = harness.answers(
        ("profile", False, folder),
        ("profile", True, "/proc/nowhere"),
        ("profile", True, folder),
        ("profile", True, folder),
        ("profile", False, folder),
        ("profile", True, folder),
    )

    assert [answer.failure is None for answer in answers] == [False, False, True, False, True, True]
    assert harness.executor.profiles == [(True, folder), (False, folder), (True, folder)]


def test_a_profiler_that_starts_on_some_ranks_only_is_stopped_on_all(tmp_path: Path) -> None:
    """The caller hears that it failed, so nobody is going to stop it."""
    folder = str(tmp_path)
    harness = Harness(FakeExecutor(refuse_profile_start=True))
    (answer,) = harness.answers(("profile", True, folder))

    assert "rank 1 cannot profile" in str(answer.failure)
    assert harness.executor.profiles == [(True, folder), (False, folder)]


def test_a_trace_that_cannot_be_written_does_not_hinder_the_next_start(tmp_path: Path) -> None:
    """All ranks have stopped, whatever became of their files."""
    folder = str(tmp_path)
    harness = Harness(FakeExecutor(refuse_profile_stop=True))
    answers = harness.answers(*(("profile", is_start, folder) for is_start in (True, False, True)))

    assert [answer.failure is None for answer in answers] == [True, False, True]


def test_the_load_goes_to_every_api_server_when_it_changes() -> None:
    """API server 1 has no request, but hears of one waiting, of it running, and of its end."""
    harness = Harness()
    harness.add("r", client_index=0, max_tokens=5)
    harness.run()

    loads = [m.stats.num_running for i, m in harness.sent if i == 1 and m.stats is not None]
    assert loads == [1, 0]


def test_the_last_load_that_an_api_server_hears_is_the_load() -> None:
    """Though it changed in a step that both had a part in, and changed back in one of the other's:
    what B hears last is not that a request runs."""
    harness = Harness()
    harness.add("first", client_index=0, max_tokens=2)
    harness.run()
    harness.add("long", client_index=0, max_tokens=4)
    harness.add("short", client_index=1, max_tokens=3)
    harness.loop._is_stopped = False
    harness.run()

    loads = {i: m.stats.num_running for i, m in harness.sent if m.stats is not None}
    assert loads == {0: 0, 1: 0}


def test_dropped_messages_are_told_with_every_load() -> None:
    """Also where all API servers have a part in each step."""
    harness = Harness()
    for client_index in (0, 1):
        harness.add(f"{client_index}", client_index=client_index, max_tokens=3)
    harness.run()

    assert {m.stats.num_dropped_messages for _, m in harness.sent if m.stats is not None} == {17}


# ----------------------------------------------------------------------------- with a coordinator


def loads(harness: Harness, client_index: int) -> list[tuple[int, int, list[int]]]:
    """What was told to that client alone, beside outputs: waiting, running, by client."""
    return [
        (m.stats.num_waiting, m.stats.num_running, m.stats.num_by_client)
        for index, m in harness.sent
        if index == client_index and m.stats is not None and not m.outputs
    ]


def test_with_a_coordinator_the_load_goes_to_it_alone() -> None:
    """It hears of a request that waits, before the step that may take long, of it running, and of
    its end; an API server hears of the load only beside outputs."""
    harness = Harness(coordinator_index=2)
    harness.add("r", client_index=1, max_tokens=5)
    harness.run()

    idle, *rest = loads(harness, 2)
    assert idle == (0, 0, [])
    assert rest == [(1, 0, [0, 1]), (0, 1, [0, 1]), (0, 0, [0, 0])]
    assert loads(harness, 0) == loads(harness, 1) == []


@pytest.mark.parametrize(("interval_s", "told"), [(math.inf, 4), (0.0, 32)])
def test_a_steady_load_is_told_again_after_a_while_only(
    interval_s: float, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing comes or goes, the coordinator is told every STATS_INTERVAL_S, not each
    step."""
    monkeypatch.setattr(core_loop, "STATS_INTERVAL_S", interval_s)
    harness = Harness(coordinator_index=2)
    harness.add("r", max_tokens=30)
    harness.run()

    assert len(harness.executor.plans) == 30
    assert len(loads(harness, 2)) == told


def test_a_core_that_has_just_begun_says_that_it_has_nothing_to_do() -> None:
    """So the coordinator knows of each rank from the start."""
    harness = Harness(coordinator_index=2)
    harness.run()

    assert loads(harness, 2) == [(0, 0, [])]
