"""A real engine process on real sockets, with an executor that needs no model."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from engine import fingerprint
from engine.executor import StartExecutor
from engine.lifecycle import STOP_SIGNAL, ask_to_end
from engine.process import STOPPED, EngineProcess
from engine.wire import (
    EngineCoreOutputs,
    EngineDead,
    FinishReason,
    Heartbeat,
    LoRARequest,
    MultiModalFeature,
    Phase,
    PoolingParams,
    RequestType,
    unpack_identity,
)
from tests.helpers import faulty_start
from tests.helpers.api_peer import ApiPeer, make_request, socket_folder
from tests.helpers.core_process import TIMEOUT_S, CoreUnderTest, make_config, run_core
from tests.helpers.fake_executor import start_fake


@pytest.fixture(scope="module")
def shared_core() -> Iterator[CoreUnderTest]:
    """One engine process for the tests that leave it as it was."""
    with run_core(step_delay_s=0.001) as core:
        yield core


# ------------------------------------------------------------------------------------ requests


def test_ready_comes_first_and_says_what_an_api_server_must_know() -> None:
    """READY is the first frame on the DEALER, under the identity of rank 0, epoch 3."""
    with run_core(is_ready=False) as core:
        ready = core.api.wait_ready()

    assert unpack_identity(core.api.identity) == (0, 3) == (ready.engine_index, ready.epoch)
    assert (ready.max_model_len, ready.vocab_size, ready.dtype) == (4096, 1000, "float32")
    assert ready.block_size == 16
    assert 0 < ready.kv_cache_size_tokens <= ready.num_gpu_blocks * ready.block_size
    assert ready.fingerprint == fingerprint.take(os.devnull)


def test_a_request_brings_its_tokens_and_one_end(shared_core: CoreUnderTest) -> None:
    """Tokens come as the executor samples them, then one finish reason, stamped by the core."""
    shared_core.api.add("r", max_tokens=5)

    assert shared_core.api.finish("r") == ([100, 101, 102, 103, 104], FinishReason.LENGTH)
    stamps = [m.timestamp for m in shared_core.api.log if isinstance(m, EngineCoreOutputs)]
    assert 0 < stamps[0] <= stamps[-1] <= time.monotonic()


def test_each_api_server_gets_the_outputs_of_its_own_requests() -> None:
    """Two API servers on one engine core: READY, heartbeats and load go to both, tokens to one."""
    with run_core(num_api_servers=2) as core:
        first, second = core.peers
        first.add("a", max_tokens=3)
        assert first.finish("a") == ([100, 101, 102], FinishReason.LENGTH)
        second.wait_for(
            EngineCoreOutputs, lambda m: m.stats is not None and m.stats.num_running > 0
        )
        second.wait_for(
            EngineCoreOutputs, lambda m: m.stats is not None and not m.stats.num_running
        )
        second.wait_for(Heartbeat)

    assert all(not m.outputs for m in second.log if isinstance(m, EngineCoreOutputs))


@pytest.mark.row("F-26")
def test_an_aborted_request_ends_while_others_go_on(shared_core: CoreUnderTest) -> None:
    """ABORT of a running request: one last output, and its neighbour's tokens are untouched."""
    api = shared_core.api
    api.add("gone", max_tokens=3000)
    next(api.outputs("gone"))
    api.add("stays", max_tokens=50)
    api.abort("gone", "unknown", "gone")
    api.abort("gone")
    ends = api.finish_all("gone", "stays")

    assert ends["gone"][1] is FinishReason.ABORT
    assert ends["stays"] == (list(range(100, 150)), FinishReason.LENGTH)
    scheduler = api.call("statistics").scheduler
    assert (scheduler.num_running, scheduler.kv_cache_usage) == (0, 0.0)


@pytest.mark.row("F-26")
def test_an_abort_before_its_request_and_a_taken_id_do_nothing(
    shared_core: CoreUnderTest,
) -> None:
    """An abort reaches only what came before it, and a second request of a live id is dropped."""
    shared_core.api.abort("taken")
    shared_core.api.add("taken", max_tokens=200)
    shared_core.api.add("taken", max_tokens=1)

    assert shared_core.api.finish("taken") == (list(range(100, 300)), FinishReason.LENGTH)


def test_large_logprobs_arrive_in_frames_of_their_own(shared_core: CoreUnderTest) -> None:
    """Arrays beside the body survive the way out: 600 prompt tokens with 2 alternatives each."""
    shared_core.api.add("logprobs", prompt=600, max_tokens=1, prompt_logprobs=2)
    output = next(o for o in shared_core.api.outputs("logprobs") if o.finish_reason is not None)

    assert output.details is not None
    assert output.details.prompt_logprobs is not None
    assert output.details.prompt_logprobs.token_ids.shape == (599, 3)


# ------------------------------------------------------------------------------ broken messages

BROKEN = {
    "executor failed": [RequestType.EXECUTOR_FAILED.value, b"\xa3boo"],
    "wakeup": [RequestType.WAKEUP.value],
    "unknown type": [b"\x63", b"\xc0"],
    "long type": [b"\x00\x00", b"\xc0"],
    "empty type": [b"", b"\xc0"],
    "no body": [RequestType.ADD.value],
    "no msgpack": [RequestType.ADD.value, b"\xc1"],
    "wrong arity": [RequestType.START_DP_WAVE.value, b"\x90"],
    "extension type": [RequestType.ABORT.value, b"\x91\xd4\x01\x00"],
    "deep": [RequestType.UTILITY.value, b"\x94\x00\x00\xa1x" + b"\x91" * 10_000],
    "many frames": [RequestType.ABORT.value, b"\x90", *[b""] * 2000],
    "another client's": [RequestType.UTILITY.value, b"\x94\x05\x00\xaastatistics\x90"],
}


@pytest.mark.row("F-23")
def test_broken_messages_are_counted_and_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    """None of them disturbs a stream, the in-process types among them; the log gets few lines."""
    with run_core(step_delay_s=0.005) as core:
        core.api.add("r", max_tokens=3000)
        for frames in [*BROKEN.values()] * 10:
            core.api.send(*frames)
        scheduler = core.api.call("statistics").scheduler

        assert scheduler.num_dropped_messages == 10 * len(BROKEN)
        assert scheduler.num_running == 1
        core.api.abort("r")
        assert core.api.finish("r")[1] is FinishReason.ABORT
    assert capfd.readouterr().err.count("dropped a message") == 7  # number 1, 2, 4, … 64


@pytest.mark.row("F-23")
def test_a_broken_request_that_can_be_named_ends_with_an_error(shared_core: CoreUnderTest) -> None:
    """The client of a request that does not decode is not left waiting."""
    shared_core.api.send(RequestType.ADD.value, b"\x92\xa4name\x07")

    assert shared_core.api.finish("name") == ([], FinishReason.ERROR)


@pytest.mark.row("S-14")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_request", LoRARequest("name", 1, "path")),
        ("pooling_params", PoolingParams("embed")),
        ("mm_features", [MultiModalFeature("image", "hash", 0, 1)]),
        ("prompt_embeds", np.zeros((2, 8), dtype="<f4")),
        ("prompt_token_ids", np.asarray([1, 1000], dtype="<u4")),
        ("prompt_token_ids", np.zeros(0, dtype="<u4")),
        ("prompt_token_ids", np.zeros(4096, dtype="<u4")),
    ],
)
def test_a_request_that_cannot_be_served_gets_an_error_that_names_why(
    shared_core: CoreUnderTest, field: str, value: object
) -> None:
    """One ERROR output, for that request alone; the engine core goes on."""
    request = msgspec.structs.replace(make_request(field), **{field: value})
    shared_core.api.send_message(RequestType.ADD, request)
    output = next(shared_core.api.outputs(field))

    assert output.finish_reason is FinishReason.ERROR
    assert output.details is not None
    assert field in str(output.details.error) or "tokens" in str(output.details.error)


# ------------------------------------------------------------------------------------ utilities


def test_utilities_work_end_to_end(shared_core: CoreUnderTest, tmp_path: Any) -> None:
    """Statistics, prefix-cache reset and profile start and stop, with typed results."""
    statistics = shared_core.api.call("statistics")

    assert [worker.rank for worker in statistics.workers] == [0]
    assert shared_core.api.call("reset_prefix_cache") is True
    assert shared_core.api.call("profile", True, str(tmp_path)) is None
    assert shared_core.api.call("profile", False, str(tmp_path)) is None


# ------------------------------------------------------------------------------------ heartbeats


def test_heartbeats_beat_while_the_model_loads() -> None:
    """They say LOADING, and how long it has taken, before READY."""
    with run_core(is_ready=False, load_delay_s=60.0) as core:
        first = core.api.wait_for(Heartbeat, lambda beat: beat.phase is Phase.LOADING)
        later = core.api.wait_for(Heartbeat, lambda beat: beat.age_ms >= first.age_ms + 100)
        assert (later.phase, later.step) == (Phase.LOADING, 0)


def test_heartbeats_tell_the_age_of_a_step_that_hangs() -> None:
    """A core whose workers never answer goes on beating: EXECUTE, older and older."""
    with run_core(hang_at_step=2) as core:
        core.api.add("r")
        first = core.api.wait_for(Heartbeat, lambda beat: beat.phase is Phase.EXECUTE)
        later = core.api.wait_for(Heartbeat, lambda beat: beat.age_ms >= first.age_ms + 100)
        assert later.phase is Phase.EXECUTE


def test_an_idle_core_has_age_zero(shared_core: CoreUnderTest) -> None:
    """Idle is no phase that can hang; the step count stays."""
    shared_core.api.add("r")
    shared_core.api.finish("r")
    beats = [shared_core.api.wait_for(Heartbeat, lambda b: b.phase is Phase.IDLE) for _ in range(3)]

    assert {beat.age_ms for beat in beats} == {0}
    assert beats[0].step == beats[-1].step > 0


# ------------------------------------------------------------------------------------------ ends


def test_a_failed_executor_ends_the_core_with_its_cause(capfd: pytest.CaptureFixture[str]) -> None:
    """DEAD carries the executor's cause, which its monitor has logged: no second first cause."""
    with run_core(fail_at_step=1) as core:
        core.api.add("r")
        dead = core.api.wait_for(EngineDead)

        assert dead.cause == "worker rank=0 pid=1 died in step 1"
        assert core.exit_code() == 1
    log = capfd.readouterr().err
    assert "first cause" not in log
    assert "Traceback" not in log


def test_an_idle_core_hears_that_its_executor_has_failed() -> None:
    """A worker that dies between requests wakes the main thread from its sleep."""
    with run_core(fail_after_s=0.3) as core:
        assert "died while idle" in core.api.wait_for(EngineDead).cause
        assert core.exit_code() == 1


def test_an_exception_is_logged_once_and_dead_is_the_last_message(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A bug in the loop: one first cause with a traceback, then DEAD to every API server."""
    with run_core(num_api_servers=2, raise_at_step=1) as core:
        core.api.add("r")
        for peer in core.peers:
            assert "scripted fault in step 1" in peer.wait_for(EngineDead).cause
        assert core.exit_code() == 1
        assert [peer.receive(timeout_s=0.1) for peer in core.peers] == [None, None]
    log = capfd.readouterr().err
    assert log.count("first cause:") == 1
    assert "ZeroDivisionError" in log
    assert "Traceback" in log


@pytest.mark.parametrize(
    ("start", "cause"),
    [
        (functools.partial(start_fake, refuse_load="no such model"), "no such model"),
        (faulty_start.refuse_to_start, "no device fits"),
    ],
    ids=["while loading", "while starting workers"],
)
def test_a_config_error_travels_in_dead_and_exits_with_two(
    start: StartExecutor, cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Settings that cannot work are the operator's: the message, no traceback, exit code 2."""
    with run_core(is_ready=False, start_executor=start) as core:
        assert core.api.wait_for(EngineDead).cause == cause
        assert core.exit_code() == 2
    log = capfd.readouterr().err
    assert "Traceback" not in log
    assert "first cause" not in log


def test_a_reply_that_does_not_fit_is_a_first_cause(capfd: pytest.CaptureFixture[str]) -> None:
    """The executor has seen nothing wrong, so the core logs it, and names who was mixed up."""
    with run_core(start_executor=faulty_start.mix_up_replies) as core:
        core.api.add("r")
        assert "stranger" in core.api.wait_for(EngineDead).cause
        assert core.exit_code() == 1
    log = capfd.readouterr().err
    assert log.count("first cause:") == 1
    assert "['stranger']" in log
    assert "['r']" in log


def test_a_cause_that_is_no_text_travels_all_the_same() -> None:
    """A folder's name may hold any bytes; what cannot be sent of it is replaced."""
    with run_core(is_ready=False, refuse_load="cannot use /models/caf\udce9") as core:
        assert core.api.wait_for(EngineDead).cause == "cannot use /models/caf?"
        assert core.exit_code() == 2


def test_workers_are_ended_though_the_last_words_are_lost(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Whatever breaks at the end, no worker is left."""
    with run_core(is_ready=False, start_executor=faulty_start.lose_last_words) as core:
        assert core.exit_code() == 1
    assert "the workers are closed" in capfd.readouterr().err


@pytest.mark.parametrize("field", ["request_addresses", "output_addresses"])
def test_an_address_that_cannot_be_used_ends_the_core(
    field: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It does not hang on a socket that was never connected."""
    with run_core(is_ready=False, wire={field: ("ipc:///" + "x" * 200,)}) as core:
        assert core.exit_code() == 1
    assert capfd.readouterr().err.count("first cause:") == 1


@pytest.mark.row("F-10")
@pytest.mark.parametrize("thread", ["input", "output"])
def test_a_crashed_thread_is_a_dead_core(thread: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Not a core that silently ignores requests: DEAD still gets out, and says which thread."""
    start = {"input": faulty_start.break_input_thread, "output": faulty_start.break_output_thread}
    with run_core(start_executor=start[thread]) as core:
        core.api.add("r")

        assert f"the {thread} thread has crashed" in core.api.wait_for(EngineDead).cause
        assert core.exit_code() == 1
    assert capfd.readouterr().err.count("first cause:") == 1


@pytest.mark.parametrize(
    ("fake", "is_doing"),
    [
        ({"load_delay_s": 60.0}, lambda beat: beat.phase is Phase.LOADING),
        ({"hang_at_step": 0}, lambda beat: beat.phase is Phase.EXECUTE),
        ({}, lambda beat: beat.phase is Phase.IDLE),
    ],
    ids=["loading", "hanging", "idle"],
)
def test_the_stop_signal_ends_the_core_at_once(
    fake: dict[str, Any], is_doing: Callable[[Heartbeat], bool]
) -> None:
    """Whatever it does; the parent sees the signal, the API servers the reason. SIGINT and
    SIGTERM, which come to a whole group, are the parent's business and do nothing."""
    with run_core(is_ready="load_delay_s" not in fake, **fake) as core:
        if core.api.identity:
            core.api.add("r")
        core.api.wait_for(Heartbeat, is_doing)
        os.kill(core.pid, signal.SIGINT)
        os.kill(core.pid, signal.SIGTERM)
        core.api.wait_for(Heartbeat)
        began = time.monotonic()
        ask_to_end(core.process)

        assert core.api.wait_for(EngineDead).cause == STOPPED
        assert core.exit_code() == -STOP_SIGNAL
        assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("is_loading", [False, True])
def test_another_thread_can_stop_a_core(is_loading: bool) -> None:
    """`stop` ends a core that runs, and one that loads as soon as it has: how a Ray actor, whose
    main thread is Ray's, ends its own."""
    executor: StartExecutor = functools.partial(start_fake, load_delay_s=0.3 * is_loading)
    with socket_folder() as folder, ApiPeer(folder) as peer, ThreadPoolExecutor(1) as pool:
        core = EngineProcess(make_config([peer]))
        code = pool.submit(core.run, executor)
        if not is_loading:
            peer.wait_ready()
        core.stop()

        assert code.result(TIMEOUT_S) == -STOP_SIGNAL
        assert peer.wait_for(EngineDead).cause == STOPPED


def test_last_words_to_a_missing_api_server_hold_nothing_up_for_long() -> None:
    """ZeroMQ tries for 4 s to deliver DEAD, then the process ends all the same."""
    with run_core(num_api_servers=2, raise_at_step=0) as core:
        core.peers[1].close()
        core.api.add("r")
        core.api.wait_for(EngineDead)
        began = time.monotonic()

        assert core.exit_code() == 1
        assert time.monotonic() - began < 6.0


def test_an_ordered_stop_does_not_wait_for_api_servers_that_have_gone() -> None:
    """Who stops the engine core may have closed its sockets before."""
    with run_core() as core:
        core.api.close()
        began = time.monotonic()
        ask_to_end(core.process)

        assert core.exit_code() == -STOP_SIGNAL
        assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("load_delay_s", [0.0, 60.0], ids=["serving", "loading"])
def test_a_killed_parent_takes_the_core_with_it(load_delay_s: float) -> None:
    """SIGKILL of the parent, which can tell nobody: the engine process is gone within 5 s."""
    with socket_folder() as folder, ApiPeer(folder) as api:
        command = [sys.executable, "-m", "tests.helpers.doomed_parent"]
        addresses = [api.request_address, api.output_address, str(load_delay_s)]
        with subprocess.Popen([*command, *addresses], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            engine = psutil.Process(int(parent.stdout.readline()))
            expected = Phase.LOADING if load_delay_s else Phase.IDLE
            api.wait_for(Heartbeat, lambda beat: beat.phase is expected)
            parent.kill()
            engine.wait(timeout=5.0)


# ------------------------------------------------------------------------------------ the process


def test_an_idle_core_sleeps() -> None:
    """Under 1% of a CPU with the default heartbeat, after a request has passed."""
    with run_core(heartbeat_interval_s=1.0) as core:
        core.api.add("r")
        core.api.finish("r")
        process = psutil.Process(core.pid)
        before, began = process.cpu_times(), time.monotonic()
        core.api.wait_for(Heartbeat, lambda _: time.monotonic() - began > 2.5)
        after, elapsed_s = process.cpu_times(), time.monotonic() - began

    used_s = after.user + after.system - before.user - before.system
    assert used_s <= 0.01 * elapsed_s + 0.01  # the clock ticks every 10 ms


def test_the_process_has_its_title_and_no_torch(shared_core: CoreUnderTest) -> None:
    """`ps` shows the rank, and the process maps no library of torch."""
    process = psutil.Process(shared_core.pid)

    assert process.cmdline()[0] == "RAYWIRE::EngineCore_DP0"
    assert not [m.path for m in process.memory_maps() if "torch" in m.path]


def test_the_heap_is_frozen_for_the_garbage_collector() -> None:
    """Collections need not look at what lives as long as the process."""
    with run_core(start_executor=faulty_start.report_freeze) as core:
        assert core.api.call("statistics").workers[0].num_requests > 10_000
