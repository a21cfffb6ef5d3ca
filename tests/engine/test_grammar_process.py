"""Hostile languages in a real engine process: refused in time, one by one, and nobody waits."""

import json
import time
from itertools import pairwise

import psutil
import pytest

from engine.structured_output import StructuredOutput
from engine.wire import EngineCoreOutputs, FinishReason
from tests.helpers.core_process import run_core
from tests.helpers.grammars import schema, spec
from tests.helpers.server import wait_for

STEP_S = 0.005
LONGEST_GAP_S = 1.0
"""Between a neighbour's tokens, on a machine that is busy otherwise. To wait for a compilation
would take longer."""

REFUSED_WITHIN_S = 5.0
"""Two seconds on a quiet machine."""

HOSTILE: list[StructuredOutput] = [
    spec(
        "lark", "\n".join(["start: r0", *(f'r{i}: r{i + 1} r{i + 1} | "x"' for i in range(8000))])
    ),
    spec("lark", "\n".join(["start: R0", *(f'R{i}: R{i + 1} "x"' for i in range(8000))])),
    schema({"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}),
    spec("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000),
    schema({"$ref": "#"}),
    spec("regex", "(" * 100_000),
]


@pytest.mark.row("S-23", "S-26")
def test_neighbours_stream_on_while_hostile_languages_are_refused() -> None:
    """Each by an error of its own; the process and its neighbour's tokens are untouched."""
    with run_core(step_delay_s=STEP_S) as core:
        core.api.add("neighbour", max_tokens=3000)
        next(core.api.outputs("neighbour"))
        for i, output in enumerate(HOSTILE):
            began = time.monotonic()
            core.api.add(f"hostile-{i}", structured_output=output)
            end = next(core.api.outputs(f"hostile-{i}"))
            assert time.monotonic() - began < REFUSED_WITHIN_S
            assert end.finish_reason is FinishReason.ERROR
            assert end.details is not None
            assert end.details.error_param == "structured_outputs"
        core.api.abort("neighbour")
        assert core.api.finish("neighbour")[1] is FinishReason.ABORT

    times = [
        message.timestamp
        for message in core.api.log
        if isinstance(message, EngineCoreOutputs)
        and any(o.request_id == "neighbour" for o in message.outputs)
    ]
    assert max(later - earlier for earlier, later in pairwise(times)) < LONGEST_GAP_S


@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_that_compile_end_with_the_engine_core(is_killed: bool) -> None:
    """However that ends: in order, or by SIGKILL in the middle of a compilation."""
    with run_core(step_delay_s=STEP_S) as core:
        core.api.add("first", structured_output=schema({"type": "banana"}))
        assert core.api.finish("first")[1] is FinishReason.ERROR
        (helper,) = psutil.Process(core.pid).children()
        if is_killed:
            core.api.add("r", structured_output=HOSTILE[1])
            core.process.kill()
            core.process.join()
    wait_for(lambda: not helper.is_running(), "the end of the process that compiles")


def test_a_process_that_was_killed_is_there_again_for_the_next() -> None:
    """It may have run out of memory, or met somebody's broom."""
    with run_core(step_delay_s=STEP_S) as core:
        for i in range(2):
            core.api.add(str(i), structured_output=schema({"type": "banana", "title": str(i)}))
            output = next(core.api.outputs(str(i)))
            assert output.details is not None
            assert json.dumps(output.details.error) == '"json_schema: Invalid type: banana"'
            for helper in psutil.Process(core.pid).children():
                helper.kill()
                wait_for(lambda: helper.status() == psutil.STATUS_ZOMBIE, "its end")  # noqa: B023
