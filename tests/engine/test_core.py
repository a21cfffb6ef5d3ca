"""EngineCore: start-up, schedule, execute, update; aborts and failures in between."""

import itertools
from concurrent.futures import Future
from dataclasses import replace

import pytest

from engine.config import ParallelConfig
from engine.core import EngineCore
from engine.errors import ConfigError, ContextLengthError, ExecutorError
from engine.step import ModelRunnerOutput, SchedulerOutput
from engine.wire import EngineCoreRequest, FinishReason, Phase
from tests.helpers.engine_core import CoreUnderTest, make_config, make_request
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.simulated_workers import SimulatedWorkers


def make(**settings: object) -> CoreUnderTest:
    return CoreUnderTest(make_config(**settings))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- start-up


def test_the_core_sizes_the_cache_and_tells_the_workers() -> None:
    """What READY says and what the workers allocate is the same."""
    executor = FakeExecutor(vocab_size=77, kv_budget_bytes=64 * 4 * 100, model_max_len=300)
    core = EngineCore(make_config(num_blocks=None, block_size=4), executor)
    assert (core.num_gpu_blocks, core.max_model_len, core.vocab_size) == (100, 300, 77)
    assert (core.kv_cache_size_tokens, core.dtype) == (396, "float32")
    assert executor.spec is not None
    assert (executor.spec.num_blocks, executor.spec.max_model_len) == (100, 300)


def test_without_chunks_the_budget_must_hold_the_longest_prompt() -> None:
    """Else it would wait for ever: the operator learns at start-up."""
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 16"):
        make(max_num_batched_tokens=16, max_num_seqs=4, enable_chunked_prefill=False)


def test_what_can_never_run_is_refused_before_it_waits() -> None:
    """F-41: at `prepare`, on the input thread; nothing of it reaches the scheduler."""
    engine = make(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthError):
        engine.core.prepare(make_request("r", 16))
    assert not engine.core.has_work()
    engine.add(make_request("r", 15))
    engine.run()
    assert engine.received["r"].finish_reasons == [FinishReason.LENGTH]


# ---------------------------------------------------------------------------------------- aborts


def test_an_abort_ends_a_request_once_whatever_it_is_doing() -> None:
    """Waiting, running, or ended already: one last output at most, and no block is kept."""
    engine = make(max_num_seqs=1)
    engine.add(make_request("running", max_tokens=9), make_request("waiting"))
    engine.step()
    for _ in range(2):  # the second time they are unknown
        engine.core.abort(["running", "waiting", "never heard of"])
    engine.run()
    for name in ("running", "waiting"):
        assert engine.received[name].finish_reasons == [FinishReason.ABORT]
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert set(engine.received) == {"running", "waiting"}


def test_an_abort_after_the_forward_pass_takes_the_token_of_that_pass() -> None:
    """Aborts are drained before the update: a cancelled request costs the step, not an output."""
    engine = make()
    engine.add(make_request("r", max_tokens=9), make_request("other", max_tokens=2))
    engine.step(lambda: engine.core.abort(["r"]))
    assert engine.received["r"].token_ids == []
    assert engine.received["r"].finish_reasons == [FinishReason.ABORT]
    engine.run()
    assert engine.received["other"].finish_reasons == [FinishReason.LENGTH]


def test_an_abort_that_races_the_last_step_is_harmless() -> None:
    """H13: the request ends once, by whichever came first."""
    for is_mid_step in (True, False):
        engine = make()
        engine.add(make_request("r", max_tokens=1))
        if is_mid_step:
            engine.step(lambda engine=engine: engine.core.abort(["r"]))  # type: ignore[misc]
        else:
            engine.step()
            engine.core.abort(["r"])
        engine.run()
        reason = FinishReason.ABORT if is_mid_step else FinishReason.LENGTH
        assert engine.received["r"].finish_reasons == [reason]


def test_an_abort_is_passed_on_though_nothing_runs_any_more() -> None:
    """H11: the last output does not wait for another request; the blocks are free at once."""
    engine = make()
    engine.add(make_request("r", max_tokens=9))
    engine.step()
    engine.core.abort(["r"])
    assert engine.core.stats().kv_cache_usage == 0.0
    assert engine.core.has_work()
    engine.step()
    assert engine.received["r"].finish_reasons == [FinishReason.ABORT]
    assert not engine.core.has_work()


def test_an_aborted_id_can_be_used_again_at_once() -> None:
    """The token under way for the first one never goes to the second."""
    engine = make(stages=2)
    engine.add(make_request("r", [1, 2, 3], max_tokens=3))
    engine.step(lambda: None)
    engine.core.abort(["r"])
    engine.add(make_request("r", [4, 4], max_tokens=2))
    engine.run()
    assert engine.received["r"].finish_reasons == [FinishReason.ABORT, FinishReason.LENGTH]


def test_a_taken_id_is_dropped_and_the_first_request_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F-26: an error under that id would end the older stream."""
    engine = make()
    engine.add(make_request("r", max_tokens=2), make_request("r", [4], client_index=1))
    engine.run()
    assert engine.received["r"].clients == {0}
    assert engine.received["r"].finish_reasons == [FinishReason.LENGTH]
    assert "id is taken" in caplog.text


# -------------------------------------------------------------------------------------- the step


def test_each_client_gets_its_own_outputs() -> None:
    """By client index, with the core's statistics and clock."""
    engine = make()
    engine.add(make_request("a", client_index=0), make_request("b", client_index=2))
    outputs = engine.core.step(lambda: None)
    assert {index: [o.request_id for o in out.outputs] for index, out in outputs.items()} == {
        0: ["a"],
        2: ["b"],
    }
    assert outputs[0].stats is not None
    assert outputs[0].stats.num_running == 2
    assert outputs[0].timestamp == outputs[2].timestamp > 0


def test_the_pipeline_is_filled_before_the_core_waits() -> None:
    """As many steps under way as stages; the oldest is waited for."""
    executor = FakeExecutor(holds=True)
    core = EngineCore(make_config(stages=3, max_num_batched_tokens=8, max_num_seqs=4), executor)
    core.add(core.prepare(make_request("r", 30)))
    core._fill_stages()
    assert executor.num_held == 3
    executor.release(3)
    core.step(lambda: None)
    assert core.num_steps == 1


# -------------------------------------------------------------------------------- planned ahead


class Witness(SimulatedWorkers):
    """Writes down what a core does, in order: "plan 3", "out 2"."""

    def __init__(self, tick_s: float = 1e-9, **settings: object) -> None:
        config = make_config(**settings)  # type: ignore[arg-type]
        super().__init__(limits=config.scheduler)
        self.log: list[str] = []
        self.most_in_flight = 0
        ticks = itertools.count()
        self.core = EngineCore(config, self, clock=lambda: next(ticks) * tick_s)

    def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.log.append(f"plan {plan.step}")
        self.most_in_flight = max(self.most_in_flight, 1 + len(self.core._in_flight))
        return super().execute(plan)

    def run(self, *requests: EngineCoreRequest) -> list[str]:
        for request in requests:
            self.core.add(self.core.prepare(request))
        while self.core.has_work():
            for outputs in self.core.step(lambda: None).values():
                self.log += [f"out {self.core.num_steps}" for _ in outputs.outputs]
        return self.log


def test_steps_are_planned_ahead_by_one() -> None:
    """The next step is with the workers before the one that runs has ended, and no further one."""
    workers = Witness(ahead=True)
    log = workers.run(make_request("r", max_tokens=4))
    assert log == ["plan 1", "plan 2", "out 1", "plan 3", "out 2", "plan 4", "out 3", "out 4"]
    assert workers.most_in_flight == 2
    assert workers.num_ahead == 3


def test_planned_ahead_or_not_a_request_takes_as_many_steps() -> None:
    """Its length is known beforehand, so nothing is planned beyond it."""
    for ahead in (False, True):
        workers = Witness(ahead=ahead)
        workers.run(make_request("a", max_tokens=4), make_request("b", [3] * 90, max_tokens=1))
        assert len(workers.plans) == 4


def test_who_comes_while_a_step_runs_has_a_part_in_the_next() -> None:
    """The plan is made late, and what has come is taken just before."""
    engine = CoreUnderTest(make_config(ahead=True))
    engine.add(make_request("old", max_tokens=9))
    engine.core.step(lambda: None, take=lambda: engine.add(make_request("new", [4] * 3)))
    assert engine.scheduled(-1) == {"old": 1, "new": 3}


def test_who_is_aborted_while_a_step_runs_has_no_part_in_the_next() -> None:
    """Nor does a step run in which nobody has a part."""
    engine = CoreUnderTest(make_config(ahead=True))
    engine.add(make_request("r", max_tokens=9))
    engine.core.step(lambda: None, take=lambda: engine.core.abort(["r"]))
    engine.run()
    assert len(engine.workers.plans) == 1


def test_outputs_go_first_when_a_step_ends_sooner_than_expected() -> None:
    """Then the workers wait for the next plan, as they do without planning ahead."""
    workers = Witness(ahead=True, tick_s=1.0)  # so long that plans are never due
    log = workers.run(make_request("r", 1, max_tokens=4))
    assert log[:3] == ["plan 1", "plan 2", "out 1"]  # nobody knew how long it would take
    assert log[3:] == ["out 2", "plan 3", "out 3", "plan 4", "out 4"]


@pytest.mark.parametrize(
    ("asked", "has_free_core", "parallel", "is_ahead"),
    [
        (None, True, ParallelConfig(), True),
        (None, False, ParallelConfig(), False),
        (True, False, ParallelConfig(), True),
        (False, True, ParallelConfig(), False),
        (None, True, ParallelConfig(data_parallel_size=2), True),
        (True, True, ParallelConfig(tensor_parallel_size=2), False),
        (True, True, ParallelConfig(pipeline_parallel_size=2), False),
    ],
)
def test_plans_are_made_ahead_where_that_is_of_use(
    asked: bool | None, has_free_core: bool, parallel: ParallelConfig, is_ahead: bool
) -> None:
    """Unless the operator says, where a core is free to make them: elsewhere they hold up the
    computing. With several ranks never, as only one of them has the tokens."""
    config = make_config(max_num_batched_tokens=8, max_num_seqs=4)
    settings = replace(config.scheduler, async_scheduling=asked)
    config = replace(config, scheduler=settings, parallel=parallel)
    executor = FakeExecutor(has_free_core=has_free_core)
    core = EngineCore(config, executor)
    core.add(core.prepare(make_request("r", max_tokens=3)))
    core.step(lambda: None)
    assert (len(executor.plans) == 2) == is_ahead


def test_the_phase_says_what_the_core_is_doing() -> None:
    """Heartbeats read it from another thread: a core that hangs shows where."""
    seen: list[Phase] = []

    class Watched(SimulatedWorkers):
        def execute(self, plan: SchedulerOutput) -> Future[ModelRunnerOutput]:
            seen.append(core.phase)
            return super().execute(plan)

    core = EngineCore(make_config(), Watched())
    core.add(core.prepare(make_request("r")))
    core.step(lambda: seen.append(core.phase))
    assert [*seen, core.phase] == [Phase.SCHEDULE, Phase.EXECUTE, Phase.IDLE]
    assert core.num_steps == 1


def test_a_failure_of_the_workers_comes_out_of_step() -> None:
    """As ExecutorError, with the cause: the engine core cannot go on."""
    executor = FakeExecutor(fail_at_step=1)
    core = EngineCore(make_config(), executor)
    core.add(core.prepare(make_request("r")))
    core.step(lambda: None)
    with pytest.raises(ExecutorError, match="died in step 1"):
        core.step(lambda: None)
    core.close()
    assert executor.is_closed


def test_dropped_messages_are_passed_on_in_the_statistics() -> None:
    """The input thread counts them; nobody else sees its sockets."""
    core = EngineCore(make_config(), SimulatedWorkers(), num_dropped_messages=lambda: 7)
    assert core.stats().num_dropped_messages == 7
