"""A peer that sends rubbish: whatever the bytes, they decode or raise WireError, nothing else."""

import contextlib
import logging
import random
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import zmq

from engine.codec import Decoder, Encoder
from engine.errors import WireError
from engine.grammar.compiler import Compiler
from engine.input_thread import InputThread
from engine.request import from_wire
from engine.step import ModelRunnerOutput, SchedulerOutput, WorkerStats
from engine.thinning import ThinnedCount
from engine.utility import Statistics, make_call
from engine.wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineLoad,
    EngineReady,
    Fence,
    Fingerprint,
    FinishReason,
    FirstRequest,
    Heartbeat,
    LoadReport,
    Logprobs,
    OutputDetails,
    Phase,
    SchedulerStats,
    StartWave,
    UtilityCall,
    UtilityOutput,
)
from tests.helpers.api_peer import make_request
from tests.helpers.hostile_frames import mutate

NUM_FUZZED = 8000
"""For each message; some 100,000 together."""

FINGERPRINT = Fingerprint(1, "c", {"msgspec": "0"}, "m", "t")
READY = EngineReady(0, 1, 4096, 64, 16, 1024, "float32", 1000, 256, FINGERPRINT)
LOGPROBS = Logprobs(np.zeros((600, 2), "<u4"), np.zeros((600, 2), "<f4"), np.ones(600, "<u4"))
OUTPUT = EngineCoreOutput(
    "r", b"\1\0\0\0", FinishReason.STOP, 2, OutputDetails(new_logprobs=LOGPROBS)
)

MESSAGES: list[tuple[Any, Any]] = [
    (EngineCoreRequest, make_request("r", 8, logit_bias={1: 2.0}, stop_token_ids=(5,))),
    (EngineCoreRequest, make_request("r", 2000)),
    (list[str], ["a", "b"]),
    (StartWave, StartWave(1, 2)),
    (Fence, Fence(7)),
    (UtilityCall, make_call(0, 1, "profile", (True, "d"))),
    (EngineReady, READY),
    (EngineCoreOutputs, EngineCoreOutputs(0, 1, [OUTPUT] * 2, utility=UtilityOutput(1))),
    (Heartbeat, Heartbeat(0, 1, 2, 3, Phase.IDLE)),
    (EngineDead, EngineDead("ENGINE_CORE_DEAD", 0, 1, "c")),
    (LoadReport, LoadReport([EngineLoad(i, 1, 2, 3, 0.5, [4, 5]) for i in range(3)], 6, True)),
    (FirstRequest, FirstRequest(1, 2)),
    (
        Statistics,
        Statistics(SchedulerStats(1, 2, 0.5), [WorkerStats(0, 1, 2, 3, 4)]),
    ),
    (SchedulerOutput, SchedulerOutput(1, {"r": 2})),
    (ModelRunnerOutput, ModelRunnerOutput(1, ["r"], np.zeros(1, "<u4"), {"r": LOGPROBS})),
]


@pytest.mark.row("S-51")
@pytest.mark.parametrize(("kind", "message"), MESSAGES, ids=lambda v: getattr(v, "__name__", ""))
def test_fuzzed_frames_decode_or_raise_wire_error(kind: Any, message: Any) -> None:
    """Mutations of a valid message never get past the decoder as another error."""
    rng = random.Random(4711)
    frames = [bytes(frame) for frame in Encoder().encode(message)]
    decode = Decoder[Any](kind).decode
    num_refused = 0
    for _ in range(NUM_FUZZED):
        try:
            decode(mutate(rng, frames))
        except WireError:
            num_refused += 1

    assert num_refused > NUM_FUZZED / 4


@pytest.mark.row("S-51", "F-23")
def test_fuzzed_requests_never_hurt_the_input_thread(caplog: pytest.LogCaptureFixture) -> None:
    """Type bytes and bodies at random: each message is taken, refused or dropped."""
    rng = random.Random(4712)
    thread = make_input_thread()
    valid = [
        [bytes([i]), *(bytes(frame) for frame in Encoder().encode(message))]
        for i, message in enumerate(
            [make_request("r"), ["r"], StartWave(1), make_call(0, 1, "statistics", ())]
        )
    ]
    for _ in range(NUM_FUZZED):
        frames = mutate(rng, rng.choice(valid))
        with contextlib.suppress(WireError):
            thread._take(0, frames or [b""])

    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def make_input_thread() -> InputThread:
    """An input thread that is never started: only its handling of one message is of interest."""

    def prepare(message: EngineCoreRequest) -> Any:
        return from_wire(message, max_model_len=4096, block_size=16, is_cached=True)

    return InputThread(
        zmq.Context.instance(),
        (),
        ready=READY,
        prepare=prepare,
        dropped=ThinnedCount(),
        inbox=SimpleQueue(),
        aborts=SimpleQueue(),
        reply=lambda client_index, outputs: None,
        on_crash=lambda error: None,
        compiler=Compiler(Path("/nowhere"), 1000),
    )
