"""Calls and replies on wire 2: what can be said, and that nothing else can."""

import ast
import inspect
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

import workers
from engine.codec import Encoder
from engine.errors import ConfigError, WireError
from engine.sampling_params import SamplingParams
from engine.step import (
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
)
from tests.helpers.fake_worker import FakeWorker, FakeWorkers, make_config, make_plan
from workers import rpc

SPEC = KVCacheSpec(
    num_blocks=8, block_size=16, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64
)


def send_call(call: rpc.Call) -> rpc.Call:
    return rpc.call_decoder().decode(Encoder().encode(call))


def send_reply(reply: rpc.Reply) -> rpc.Reply:
    return rpc.reply_decoder().decode(Encoder().encode(reply))


@pytest.mark.parametrize(
    "call",
    [
        rpc.load,
        rpc.initialize_kv_cache(SPEC),
        rpc.execute_model(make_plan(3, "a", "b"), output_rank=2),
        rpc.statistics,
        rpc.profile(True, "/tmp/traces"),
    ],
    ids=rpc.method,
)
def test_calls_arrive_as_they_were_made(call: rpc.Call) -> None:
    """Each method, with its own types."""
    assert send_call(call) == call


def test_call_is_method_args_kwargs_output_rank() -> None:
    """In this order on the wire, whatever the method."""
    (body,) = Encoder().encode(rpc.execute_model(make_plan(3), output_rank=2))
    method, args, kwargs, output_rank = msgspec.msgpack.decode(body)
    assert (method, len(args), kwargs, output_rank) == ("execute_model", 1, {}, 2)
    (body,) = Encoder().encode(rpc.profile(True, "/traces"))
    assert msgspec.msgpack.decode(body) == [
        *("profile", [], {"is_start": True, "directory": "/traces"}, None)
    ]


def test_prompts_travel_out_of_band() -> None:
    """A long prompt is a frame of its own, not a list in the body."""
    request = NewRequest("a", np.arange(5000, dtype="<u4"), 5000, 0, [1, 2], SamplingParams())
    plan = SchedulerOutput(1, {"a": 5000}, new_requests=[request])
    frames = Encoder().encode(rpc.execute_model(plan, 0))
    assert [len(frame) for frame in frames[1:]] == [20_000]
    received = rpc.call_decoder().decode(frames)
    assert isinstance(received, rpc.ExecuteModel)
    assert np.array_equal(received.args[0].new_requests[0].token_ids, request.token_ids)


@pytest.mark.parametrize(
    "call",
    [
        ["close", [], {}, None],
        ["__init__", [], {}, None],
        ["os.system", ["true"], {}, None],
        ["load", ["extra"], {}, None],
        ["statistics", [], {"extra": 1}, None],
        ["execute_model", [], {}, 0],
        ["execute_model", ["a plan"], {}, 0],
        ["profile", [], {"is_start": 1, "directory": "/tmp"}, None],
        ["profile", [], {"is_start": True}, None],
        ["load", [], {}, "0"],
        [],
        {"method": "load"},
    ],
)
def test_anything_else_is_refused(call: object) -> None:
    """Unknown methods, and known ones with other arguments than they take."""
    with pytest.raises(WireError):
        rpc.call_decoder().decode([msgspec.msgpack.encode(call)])


def test_each_method_exists_and_answers_under_its_own_name(tmp_path: Path) -> None:
    """The structs, the Worker protocol and the replies agree on the names."""
    worker = FakeWorker(make_config(), 0, "/dev/null", FakeWorkers())
    calls: list[rpc.Call] = [
        rpc.load,
        rpc.initialize_kv_cache(SPEC),
        rpc.execute_model(make_plan(1), 0),
        rpc.execute_model(awaiting(make_plan(2)), 0),
        rpc.sample_tokens(TokenMasks(2), 3, 0),
        rpc.statistics,
        rpc.profile(True, str(tmp_path)),
    ]
    assert {type(call) for call in calls} == set(get_args(rpc.Call))
    for number, call in enumerate(calls):
        reply = rpc.perform(worker, call, number)
        assert (reply is not None) == rpc.is_answered(call)
        assert hasattr(rpc.Worker, rpc.method(call))
        if reply is not None:
            # A step that awaited its masks is answered under its own number and name.
            is_second = isinstance(call, rpc.SampleTokens)
            assert send_reply(reply).call == (3 if is_second else number)
            assert rpc.method(reply) == ("execute_model" if is_second else rpc.method(call))


def awaiting(plan: SchedulerOutput) -> SchedulerOutput:
    return msgspec.structs.replace(plan, awaits_masks=True)


def test_ranks_without_an_output_have_no_reply() -> None:
    """`execute_model` gives None on all ranks but one."""
    config = make_config(pipeline_parallel_size=2)
    worker = FakeWorker(config, 0, "/dev/null", FakeWorkers())
    assert rpc.perform(worker, rpc.execute_model(make_plan(1), 1), 0) is None


def test_profiler_that_does_not_work_is_refused() -> None:
    """A reply like any other, so the worker goes on."""
    worker = FakeWorker(make_config(), 0, "/dev/null", FakeWorkers())
    reply = rpc.perform(worker, rpc.profile(True, "/does/not/exist"), 7)
    assert isinstance(reply, rpc.Refused)
    assert "No such file" in reply.result


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConfigError("no such model; try another"), "config", "no such model; try another"),
        (ValueError("boom"), "other", "ValueError: boom"),
        (OSError("bad name \udcff"), "other", "OSError: bad name ?"),
        (RuntimeError("x" * 100_000), "other", "RuntimeError: " + "x" * (rpc.MAX_CHARS - 14)),
    ],
)
def test_failures_cross_as_structs(error: Exception, kind: str, message: str) -> None:
    """Kind, message, traceback, what was done: bounded, and always possible to encode."""
    failed = send_reply(rpc.describe_failure(error, call=3, doing="load"))
    assert isinstance(failed, rpc.Failed)
    assert (failed.call, failed.doing, failed.kind, failed.message) == (3, "load", kind, message)
    assert len(failed.traceback) <= rpc.MAX_CHARS


def test_output_keeps_its_arrays() -> None:
    """A step's result, as the output rank sends it."""
    output = ModelRunnerOutput(9, ["a"], np.array([17], dtype="<u4"))
    reply = send_reply(rpc.Executed(4, output))
    assert isinstance(reply, rpc.Executed)
    assert reply.result.sampled_token_ids.tolist() == [17]


def test_wire_two_never_touches_pickle() -> None:
    """No file of the ring's imports it, and only descriptors know of multiprocessing's own."""
    folder = Path(inspect.getfile(workers)).parent
    for name in ("ring", "rpc", "side_channel", "shared_memory", "wakeup", "pending_calls"):
        imported = set()
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
        assert not {i for i in imported if i.split(".")[0] in ("pickle", "multiprocessing")}


def test_reports_of_all_kinds_are_replies() -> None:
    """What loading brings, with its defaults."""
    report = WorkerReport(0, "float32", 10, 20, 30, 40)
    assert send_reply(rpc.Loaded(0, report)) == rpc.Loaded(0, report)
