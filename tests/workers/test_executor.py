"""The executor with real worker processes, in which a fake worker stands for the model."""

import contextlib
import itertools
import logging
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import psutil
import pytest

from engine.config import ExecutorConfig
from engine.errors import ConfigError, ExecutorError, RequestFailedError
from engine.sampling_params import SamplingParams
from engine.step import KVCacheSpec, NewRequest, SchedulerOutput, TokenMasks
from tests.helpers import ring_processes
from tests.helpers.fake_worker import DAWDLE_S, FakeWorkers, Fault, make_config, make_plan
from workers import executor, shared_memory
from workers.executor import MultiprocExecutor

MIB = 1 << 20
SPEC = KVCacheSpec(
    num_blocks=8, block_size=16, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64
)


@dataclass
class Started:
    """An executor, and what it told its engine core about failures."""

    executor: MultiprocExecutor
    causes: list[str]
    has_failed: threading.Event

    def workers(self) -> list[psutil.Process]:
        """Worker processes by rank."""
        return [psutil.Process(stats.pid) for stats in self.executor.statistics()]


@contextlib.contextmanager
def start(
    folder: Path,
    *faults: Fault,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    output_bytes: int = 0,
    causes: list[str] | None = None,
    ring_chunk_bytes: int = 1 << 20,
    **settings: float,
) -> Iterator[Started]:
    causes = [] if causes is None else causes
    has_failed = threading.Event()

    def on_failure(cause: str) -> None:
        causes.append(cause)
        has_failed.set()

    config = make_config(
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        executor=ExecutorConfig(
            ring_chunk_bytes=ring_chunk_bytes,
            rpc_base_path=str(folder),
            **settings,  # type: ignore[arg-type]
        ),
    )
    executor = MultiprocExecutor(config, on_failure, FakeWorkers(faults, output_bytes))
    with contextlib.closing(executor):
        yield Started(executor, causes, has_failed)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short path for socket folders; empty again after each test."""
    path = tmp_path_factory.mktemp("rpc")
    yield path
    assert list(path.iterdir()) == []


def first_causes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.levelno == logging.ERROR and "first cause:" in record.message
    ]


def num_sleeps() -> int:
    """How often the threads of this process have gone to sleep: each time they have been awake."""
    return sum(
        int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.M)[0])
        for status in Path("/proc/self/task").glob("*/status")
    )


# ------------------------------------------------------------------------ working


def test_every_rank_executes_and_one_replies(folder: Path) -> None:
    """Two tensor ranks: reports and statistics come from both, a step's output from one."""
    with start(folder, tensor_parallel_size=2) as started:
        executor = started.executor
        assert [report.rank for report in executor.load()] == [0, 1]
        executor.initialize_kv_cache(SPEC)
        output = executor.execute(make_plan(1, "a", "b")).result()
        assert output.request_ids == ["a", "b"]
        assert output.sampled_token_ids.tolist() == [1, 1]
        assert [stats.num_steps for stats in executor.statistics()] == [1, 1]


def test_last_pipeline_stage_replies(folder: Path) -> None:
    """Two stages: the output rank is the last stage's first."""
    with start(folder, pipeline_parallel_size=2) as started:
        started.executor.load()
        assert started.executor.execute(make_plan(5)).result().step == 5


def test_workers_are_processes_with_their_titles(folder: Path) -> None:
    """As `ps` shows them."""
    with start(folder, tensor_parallel_size=2) as started:
        titles = [worker.cmdline()[0] for worker in started.workers()]
        assert titles == ["RAYWIRE::Worker_DP0_PP0_TP0", "RAYWIRE::Worker_DP0_PP0_TP1"]


@pytest.mark.row("S-05")
def test_workers_meet_on_the_loopback_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo is told to listen there, wherever the host's name leads."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with start(folder, tensor_parallel_size=2) as started:
        assert [report.description for report in started.executor.load()] == ["lo", "lo"]


def test_steps_in_flight_come_back_in_order(folder: Path) -> None:
    """More steps than the ring has chunks, all before the first result is taken."""
    with start(folder, tensor_parallel_size=2) as started:
        futures = [started.executor.execute(make_plan(step)) for step in range(30)]
        assert [future.result().step for future in futures] == list(range(30))


def large_plan(step: int) -> SchedulerOutput:
    """With a prompt of 2 MiB."""
    request = NewRequest(
        request_id="a",
        token_ids=np.arange(1 << 19, dtype="<u4"),
        num_prompt_tokens=1 << 19,
        num_computed_tokens=0,
        block_ids=[],
        sampling_params=SamplingParams(),
    )
    return SchedulerOutput(step, {"a": 1}, new_requests=[request])


def test_messages_larger_than_a_chunk_travel_both_ways(folder: Path) -> None:
    """A prompt of 2 MiB and an output of 3 MiB, with chunks of 1 MiB, among small steps."""
    with start(folder, tensor_parallel_size=2, output_bytes=3 << 20) as started:
        futures = [
            started.executor.execute(large_plan(step) if step % 2 else make_plan(step))
            for step in range(6)
        ]
        outputs = [future.result() for future in futures]
        assert [output.sampled_token_ids.nbytes for output in outputs] == [3 << 20] * 6
        assert [int(output.sampled_token_ids[-1]) for output in outputs] == list(range(6))


def test_profiler_that_does_not_work_is_no_failure(folder: Path, tmp_path: Path) -> None:
    """The caller hears why, and the workers go on."""
    with start(folder, tensor_parallel_size=2) as started:
        with pytest.raises(RequestFailedError, match="No such file or directory"):
            started.executor.profile(True, "/does/not/exist")
        started.executor.profile(True, str(tmp_path))
        assert {path.name for path in tmp_path.iterdir()} == {"trace-0", "trace-1"}
        assert not started.causes


def test_idle_workers_use_no_cpu(folder: Path) -> None:
    """Parked means asleep: under 2% of a core for both workers together."""
    with start(folder, tensor_parallel_size=2) as started:
        workers = started.workers()
        before_s = sum(sum(worker.cpu_times()[:2]) for worker in workers)
        assert not started.has_failed.wait(1.0)
        assert sum(sum(worker.cpu_times()[:2]) for worker in workers) - before_s <= 0.02


# ------------------------------------------------------------------------ failing


def test_failure_on_a_rank_that_does_not_reply_is_reported(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 raises in a step that rank 0 answers: rank, call and error, once, with its
    traceback in the log."""
    fault = Fault(1, "execute_model", "raise", step=3)
    with start(folder, fault, tensor_parallel_size=2) as started:
        started.executor.execute(make_plan(3))
        assert started.has_failed.wait(10)
        with pytest.raises(ExecutorError) as caught:
            started.executor.execute(make_plan(4)).result()
    assert "worker DP0_PP0_TP1 pid=" in caught.value.cause
    assert caught.value.cause.endswith("failed in execute_model step 3: ValueError: boom on rank 1")
    assert started.causes == [caught.value.cause]
    (line,) = first_causes(caplog)
    assert 'raise ValueError(f"boom on rank' in line


def test_a_step_that_awaits_masks_is_answered_when_it_has_them(folder: Path) -> None:
    """By the output rank, in order with the others; the call that brings them has no reply."""
    with start(folder, tensor_parallel_size=2) as started:
        executor = started.executor
        first = executor.execute(make_plan(1))
        second = executor.execute(awaiting(make_plan(2)))
        assert first.result(10).step == 1
        assert not second.done()
        executor.sample(TokenMasks(2, ["a"], np.ones((1, 9), "<u4")))
        third = executor.execute(make_plan(3))
        assert [future.result(10).step for future in (second, third)] == [2, 3]


def test_a_failure_between_a_step_and_its_masks_is_the_steps(folder: Path) -> None:
    """Whichever of the two calls it happens in."""
    for method in ("execute_model", "sample_tokens"):
        with start(folder, Fault(0, method, "raise", 2), tensor_parallel_size=2) as started:
            future = started.executor.execute(awaiting(make_plan(2)))
            started.executor.sample(TokenMasks(2))
            with pytest.raises(ExecutorError, match=f"failed in {method} step 2"):
                future.result(10)


def awaiting(plan: SchedulerOutput) -> SchedulerOutput:
    return msgspec.structs.replace(plan, awaits_masks=True)


@pytest.mark.row("S-02")
def test_hostile_message_ends_the_worker_and_runs_nothing(folder: Path, tmp_path: Path) -> None:
    """A pickle in a worker's ring, written by a process that got hold of the memory: a protocol
    error that names it, and no side effect (CVE-2024-11041)."""
    trap = tmp_path / "trap"
    with start(folder) as started:
        started.executor.load()
        started.executor._calls.write([pickle.dumps(Exploit(trap))], "forged", timeout_s=10)
        assert started.has_failed.wait(10)
    assert "failed in reading a call: WireError" in started.causes[0]
    assert not trap.exists()


class Exploit:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def test_killed_worker_fails_the_step_under_way(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGKILL in the middle of a step: the future fails at once, with rank, pid, signal and
    step."""
    fault = Fault(0, "execute_model", "kill", step=17)
    with start(folder, fault, tensor_parallel_size=2) as started:
        pids = [worker.pid for worker in started.workers()]
        began_s = time.monotonic()
        with pytest.raises(ExecutorError) as caught:
            started.executor.execute(make_plan(17)).result()
        assert time.monotonic() - began_s < 2
        assert started.has_failed.wait(10)
    who = f"worker DP0_PP0_TP0 pid={pids[0]} node={socket.gethostname()}"
    cause = caught.value.cause
    assert cause.startswith(f"{who} killed by SIGKILL during execute_model step 17")
    assert started.causes == [cause]
    assert first_causes(caplog) == [f"first cause: {cause}"]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_worker_killed_while_idle_is_noticed(folder: Path) -> None:
    """Nobody waits for it, and still the engine core hears of it at once."""
    with start(folder, tensor_parallel_size=2) as started:
        worker = started.workers()[1]
        worker.kill()
        assert started.has_failed.wait(2)
        (cause,) = started.causes
        who = f"worker DP0_PP0_TP1 pid={worker.pid} node={socket.gethostname()}"
        assert cause.startswith(f"{who} killed by SIGKILL after statistics")
        with pytest.raises(ExecutorError, match="killed by SIGKILL"):
            started.executor.statistics()


def test_large_message_to_a_killed_worker_holds_nothing_up(folder: Path) -> None:
    """What is too large for a chunk goes to a socket that has lost its peer: the call fails, and
    returns."""
    with start(folder) as started:
        (worker,) = started.workers()
        worker.kill()
        calls = (started.executor.execute(large_plan(step)) for step in itertools.count())
        with pytest.raises(ExecutorError, match="killed by SIGKILL"):
            [call.result() for call in calls]


def test_worker_that_exits_is_a_failure(folder: Path) -> None:
    """Also without a signal or a report."""
    with start(folder, Fault(0, "load", "exit")) as started:
        with pytest.raises(ExecutorError, match="ended with exit code 3 during load"):
            started.executor.load()


def test_step_without_a_reply_in_time_has_failed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 hangs in step 1. Rank 0 answers that, and step 2 comes to the end of its time: the
    cause names who owes the reply, and who has not even read the call."""
    fault = Fault(1, "execute_model", "hang", step=1)
    with start(folder, fault, tensor_parallel_size=2, execute_timeout_s=1.0) as started:
        pids = [worker.pid for worker in started.workers()]
        started.executor.execute(make_plan(1)).result()
        with pytest.raises(ExecutorError) as caught:
            started.executor.statistics()
        assert "statistics has no reply in" in caught.value.cause
        assert f"due from worker DP0_PP0_TP1 pid={pids[1]}" in caught.value.cause
        assert caught.value.cause.endswith(f"not read by worker DP0_PP0_TP1 pid={pids[1]}")
    assert len(first_causes(caplog)) == 1


def test_a_step_that_was_sent_early_is_not_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time begins when the step before it has ended."""
    monkeypatch.setattr(executor, "_LOOK_UP_S", 0.05)
    faults = [Fault(0, "execute_model", "dawdle", step) for step in (1, 2)]
    with start(folder, *faults, execute_timeout_s=1.6 * DAWDLE_S) as started:
        futures = [started.executor.execute(make_plan(step)) for step in (1, 2)]
        assert [future.result().step for future in futures] == [1, 2]


def test_ring_that_stays_full_is_a_failure(folder: Path) -> None:
    """A worker that reads no more: once the ring is full the next step fails in time, not never."""
    fault = Fault(1, "execute_model", "hang", step=0)
    with start(folder, fault, tensor_parallel_size=2, execute_timeout_s=1.0) as started:
        futures = [started.executor.execute(make_plan(step)) for step in range(12)]
        with pytest.raises(ExecutorError, match=r"no free chunk .* is not read by worker .*_TP1"):
            futures[-1].result()


def test_worker_stopped_for_a_moment_fails_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGSTOP for less than the timeout: a warning per interval, not per step, and all steps."""
    with start(folder, tensor_parallel_size=2, ring_warning_interval_s=0.5) as started:
        worker = started.workers()[0]
        worker.suspend()
        futures = [started.executor.execute(make_plan(step)) for step in range(5)]
        while "has no reply" not in caplog.text:
            assert not started.has_failed.wait(0.01)
        worker.resume()
        assert [future.result().step for future in futures] == list(range(5))
    (warning,) = [message for message in caplog.messages if "has no reply" in message]
    assert "execute_model step 0 has no reply in 1 s: due from worker DP0_PP0_TP0" in warning


# ------------------------------------------------------------------------ starting


def start_until_ready(folder: Path, fault: Fault, causes: list[str]) -> None:
    with start(folder, fault, tensor_parallel_size=2, causes=causes) as started:
        started.executor.load()
        started.executor.initialize_kv_cache(SPEC)


@pytest.mark.parametrize("method", ["start", "load", "initialize_kv_cache"])
def test_config_error_travels_up_as_its_message(
    folder: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """A worker that refuses the settings: the same one line comes out here, and nothing failed."""
    causes: list[str] = []
    with pytest.raises(ConfigError) as caught:
        start_until_ready(folder, Fault(1, method, "config"), causes)
    assert str(caught.value) == "unknown architecture 'Foo'; try another model"
    assert causes == []
    assert first_causes(caplog) == []


def make_ready(executor: MultiprocExecutor) -> None:
    executor.load()
    executor.initialize_kv_cache(SPEC)


@pytest.mark.parametrize("method", ["load", "initialize_kv_cache"])
def test_a_start_that_takes_too_long_names_who_is_missing(folder: Path, method: str) -> None:
    """One rank is done, the other one never is: there is one deadline for the whole start."""
    fault = Fault(1, method, "hang")
    with start(folder, fault, tensor_parallel_size=2) as started:
        started.executor._start_deadline_s = time.monotonic() + 0.5
        with pytest.raises(ExecutorError) as caught:
            make_ready(started.executor)
    assert f"{method} has no reply in" in caught.value.cause
    assert "due from worker DP0_PP0_TP1" in caught.value.cause
    assert "TP0" not in caught.value.cause


def test_workers_that_do_not_appear_in_time_are_named(folder: Path) -> None:
    """No process starts in a millisecond: all of them are missing, and none is left."""
    with pytest.raises(
        ExecutorError, match=r"no sign within 0.001 s of .*_TP0 pid=\d+, .*_TP1 pid="
    ):
        with start(folder, tensor_parallel_size=2, start_timeout_s=0.001):
            pass
    assert multiprocessing.active_children() == []


def ring_mebibytes() -> list[int]:
    """The rings in this process' memory, smallest first, without their few bytes of metadata."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in maps if "/memfd:raywire" in line]
    sizes = [int(end, 16) - int(start, 16) for start, end in ends]
    return sorted(size // MIB for size in sizes if size > MIB)


@pytest.mark.row("F-43")
def test_rings_shrink_to_the_memory_there_is(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 14 chunks of 2 MiB where 8 MiB are wanted: one warning with the numbers, rings of
    that size, and messages that do not fit a chunk any more still travel."""
    monkeypatch.setattr(shared_memory, "room_for_rings", lambda _: 28 * MIB)
    with start(folder, ring_chunk_bytes=8 * MIB, output_bytes=3 * MIB) as started:
        assert ring_mebibytes() == [4 * 2, 10 * 2]
        output = started.executor.execute(make_plan(3)).result()
        assert output.sampled_token_ids.nbytes == 3 * MIB
    [warning] = [record.message for record in caplog.records if "shrink" in record.message]
    assert "from 8.0 to 2.0 MiB: 14 of them may take 28 MiB together" in warning


@pytest.mark.row("F-43")
def test_too_little_memory_for_the_rings_is_told_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, with what is needed and what there is."""
    monkeypatch.setattr(shared_memory, "room_for_rings", lambda _: 10 * MIB)
    with pytest.raises(ConfigError, match=r"need 14 MiB .*may take 10 MiB"):
        with start(folder):
            pass
    assert multiprocessing.active_children() == []


def test_too_many_workers_for_a_ring_are_refused(folder: Path) -> None:
    """Before anything starts, with the limit."""
    with pytest.raises(ConfigError, match=r"17 workers .* at most 16 readers"):
        with start(folder, tensor_parallel_size=17):
            pass


@pytest.mark.parametrize(
    ("name", "value"),
    [("ring_chunk_bytes", 100), ("ring_chunk_bytes", 2 << 30), ("execute_timeout_s", 0.0)],
)
def test_settings_that_cannot_work_are_refused(name: str, value: float) -> None:
    """Where they are made, with their name's meaning and the value."""
    with pytest.raises(ConfigError, match=str(value)):
        ExecutorConfig(**{name: value})  # type: ignore[arg-type]


def test_the_engine_cores_side_imports_no_torch() -> None:
    """Importing the executor, and so the worker's entry file, leaves torch alone."""
    code = "import sys, workers.executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ------------------------------------------------------------------------ ending


def open_files() -> set[str]:
    """What this process has open."""
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return links


@pytest.mark.parametrize("is_failing", [False, True], ids=["in order", "after a failure"])
def test_closing_leaves_nothing(folder: Path, is_failing: bool) -> None:
    """No process, thread, descriptor or socket file; and it may be closed twice."""
    with start(folder):
        pass  # what is opened once and kept: the resource tracker's pipe
    files, threads = open_files(), threading.enumerate()
    with start(folder, tensor_parallel_size=2) as started:
        assert list(folder.iterdir()) == []
        workers = started.workers()
        if is_failing:
            workers[0].kill()
            assert started.has_failed.wait(10)
        started.executor.close()
        assert not any(worker.is_running() for worker in workers)
    assert open_files() <= files
    assert threading.enumerate() == threads


def test_nobody_spins_while_a_step_runs(folder: Path) -> None:
    """Who waits for a step sleeps until it is done, but for the look at deadlines every second."""
    with start(folder, Fault(0, "execute_model", "stop", step=1)) as started:
        (worker,) = started.workers()
        reply = started.executor.execute(make_plan(1))
        before = num_sleeps()
        with pytest.raises(TimeoutError):
            reply.result(2.0)
        assert num_sleeps() - before < 20
        worker.resume()
        assert reply.result().step == 1


def test_closing_does_not_wait_for_workers_that_hang(folder: Path) -> None:
    """After a failure the others may be stuck in a collective: they are killed soon."""
    faults = Fault(0, "execute_model", "raise"), Fault(1, "execute_model", "hang")
    with start(folder, *faults, tensor_parallel_size=2) as started:
        workers = started.workers()
        with pytest.raises(ExecutorError):
            started.executor.execute(make_plan(0)).result()
        began_s = time.monotonic()
        started.executor.close()
        assert time.monotonic() - began_s < 3
        assert not any(worker.is_running() for worker in workers)


def has_nameless_rings(pid: int) -> bool:
    """Whether a process has the rings in its memory, and nothing there that has a name."""
    mapped = Path(f"/proc/{pid}/maps").read_text()
    return "/memfd:raywire (deleted)" in mapped and "/dev/shm/" not in mapped


def run_core(pipe: Connection, folder: str, start_method: Literal["spawn", "fork"]) -> None:
    """An engine core that loads its workers and is killed then."""
    config = make_config(
        tensor_parallel_size=2,
        executor=ExecutorConfig(
            ring_chunk_bytes=1 << 20, rpc_base_path=folder, start_method=start_method
        ),
    )
    executor = MultiprocExecutor(config, lambda cause: None, FakeWorkers())
    executor.load()
    pipe.send([stats.pid for stats in executor.statistics()])
    executor.execute(make_plan(0)).result()
    pipe.recv()


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_killed_engine_core_leaves_nothing(folder: Path, start_method: str) -> None:
    """SIGKILL of the parent ends all workers, and no name was left to clean up, whatever the
    start method."""
    with ring_processes.start("core", run_core, str(folder), start_method) as core:
        workers = [psutil.Process(pid) for pid in core.hear()]
        assert all(has_nameless_rings(process.pid) for process in workers)
        os.kill(core.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert alive == []
