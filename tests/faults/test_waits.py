"""Nothing hangs: every wait has a deadline, or watches for the death of its counterpart, or there
is a reason why it need not."""

import pytest

from tests.waits import all_waits, waits_in

NO_WAIT = "does not wait: a look, or a context variable"
WOKEN_BY_DEATH = "its other end is a pipe or a process, whose end wakes it"
FAILED_BY_CLIENT = (
    "`EngineClient` fails all streams and calls when a core is dead, hung or gone, and when it is"
    " closed; nobody is left waiting"
)
PARKED = "a thread of ours without work: what wakes it is in this process, and it is a daemon"
HAS_RESULT = "is asked once it is done"
LINGER = "ends within the linger of its sockets, which is bounded (`engine/sockets.py`)"
BY_HAND = "a person has started it, and sees it: `make demo-cluster`"

REASONS = {
    "api/engine_client.py::EngineClient.wait_dead": "a sign among others, cancelled with them",
    "api/engine_start.py::EngineStart.wait_for_change": "inside `wait_ready`'s `asyncio.timeout`",
    "api/errors.py::Failure.anthropic_body": NO_WAIT,
    "api/generate.py::Generation.news": FAILED_BY_CLIENT,
    "api/llm.py::LLM._wait_ready": "`wait_ready` has the start's deadline",
    "api/llm.py::LLM._call_engine": "UTILITY calls have a timeout, and fail with the engine",
    "api/llm.py::LLM._run": FAILED_BY_CLIENT,
    "api/offline.py::Batch.run": FAILED_BY_CLIENT,
    "api/offline.py::show_progress": "`Batch.run` puts an end to it however it ends",
    "api/process.py::_listen": "set at the latest when the server ends",
    "api/process.py::_Server.main_loop": "inside `asyncio.wait_for`",
    "api/process.py::_until_there_is_a_reason_to_end": HAS_RESULT,
    "api/process.py::_until_a_sign": "serves until there is a sign: a signal, a death, an end",
    "api/responses/background.py::History.wait": FAILED_BY_CLIENT,
    "api/responses/background.py::HistoryReader.next": FAILED_BY_CLIENT,
    "api/template_sandbox.py::_BoundedLoop.__iter__": NO_WAIT,
    "api/template_sandbox.py::render": NO_WAIT,
    "api/tenant.py::salted": NO_WAIT,
    "api/threads.py::_hand_over": HAS_RESULT,
    "api/threads.py::_Lane._work": PARKED,
    "api/wire_sockets.py::WireSockets.close": LINGER,
    "cluster/api_server_process.py::_Command.wait_for_begin": (
        "the channel's end wakes it, and the command ends us with itself, or if we are late"
    ),
    "cluster/api_server_process.py::_Command.may_serve": (
        "the command ends all if one of us does not load in time (`ApiServers._check_start`), and"
        " a newcomer alone (`ApiServers._check_pulse`), which need not wait for others"
    ),
    "cluster/api_servers.py::ApiServers.run": HAS_RESULT,
    "cluster/batch/command.py::_unless_ended": (
        "watches the server's process; the job watches whether it answers"
    ),
    "cluster/channel.py::Channel.receive": WOKEN_BY_DEATH,
    "cluster/command_watch.py::_watch": WOKEN_BY_DEATH,
    "cluster/coordinator_process.py::CoordinatorServer._close": LINGER,
    "cluster/demo.py::wait_ready": NO_WAIT,
    "cluster/demo_cluster.py::main": BY_HAND,
    "cluster/demo_keeper.py::main.is_over": NO_WAIT,
    "cluster/demo_keeper.py::_ray_head": "has a timeout: this `ray` is a process",
    "cluster/demo_keeper.py::_run_job": NO_WAIT,
    "cluster/drain.py::drain": NO_WAIT,
    "cluster/hybrid.py::NodeServer.run": WOKEN_BY_DEATH,
    "cluster/hybrid.py::serve": HAS_RESULT,
    "cluster/hybrid.py::_NodeServers._watch": "Ray's call of `run` ends with the actor or its node",
    "cluster/metrics_hub.py::MetricsHub._run": PARKED,
    "cluster/ray_actors.py::_answer": HAS_RESULT,
    "cluster/ray_actors.py::end_of": HAS_RESULT,
    "cluster/ray_keeper.py::RayKeeper.leave": "it has been killed",
    "cluster/ray_session.py::_init.run": "stays on purpose: Ray's processes end with this thread",
    "cluster/supervisor.py::Supervisor._watch": WOKEN_BY_DEATH,
    "cluster/supervisor.py::_reap": "its sentinel says that it has ended",
    "engine/core.py::EngineCore._execute": (
        "the executor fails its futures: at a worker's death, and at the latest after"
        " RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS"
    ),
    "engine/core_loop.py::CoreLoop._take": (
        "sleeps until there is work; crashed threads, a failed executor and a stop are work"
    ),
    "engine/doorkeeper.py::Doorkeeper._run": "ends with its context",
    "engine/grammar/check_process.py::_in_small_stack": "the process has a limit of processor time",
    "engine/grammar/checker.py::Checker.close": "it has been killed",
    "engine/grammar/checker.py::Checker._started": NO_WAIT,
    "engine/grammar/station.py::Station._next_job": PARKED,
    "engine/input_thread.py::InputThread._receive_for_ever": "ends with its context",
    "engine/lifecycle.py::_watch": WOKEN_BY_DEATH,
    "engine/lifecycle.py::in_lasting_thread.run_and_stay": "stays on purpose, until its block ends",
    "engine/log.py::_Formatter.format": NO_WAIT,
    "engine/process.py::EngineProcess._end": LINGER,
    "engine/run_log.py::_KeptLines.emit": NO_WAIT,
    "workers/executor.py::MultiprocExecutor._call": "each call has a timeout of its own",
    "workers/parallel.py::Parallel.send": (
        "a peer that dies breaks it; for one that hangs, the executor's timeout ends all workers"
    ),
    "workers/process.py::Wires.close": LINGER,
    "workers/side_channel.py::SideChannel.confirm": "after a poll with a timeout",
    "workers/wakeup.py::Waiter.__init__": NO_WAIT,
}
"""Why it may wait without a limit, by place."""


def test_every_wait_has_a_limit_or_a_reason() -> None:
    """A new one is a decision: give it a deadline, or say here why it needs none."""
    waits = all_waits()
    unexplained = {place: calls for place, calls in waits.items() if place not in REASONS}
    assert unexplained == {}
    assert set(REASONS) - set(waits) == set(), "these wait no more"


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("event.wait()", True),
        ("event.wait(1.0)", False),
        ("process.join()", True),
        ("', '.join(names)", False),
        ("future.result(timeout=3)", False),
        ("socket.recv_multipart()", True),
        ("ray.get(call)", True),
        ("ray.wait(calls, timeout=1)", False),
        ("connection.wait([sentinel])", True),
        ("condition.wait_for(is_done)", True),
        ("condition.wait_for(is_done, 5.0)", False),
    ],
)
def test_waits_are_told_from_other_calls(call: str, is_found: bool) -> None:
    """By name and arguments."""
    assert bool(list(waits_in(f"def f():\n    {call}\n"))) == is_found
