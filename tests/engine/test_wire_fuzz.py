"""A peer that sends rubbish: whatever the bytes, they decode or raise WireError, nothing else."""

import contextlib
import logging
import random
from collections.abc import Callable
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


def mutate(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """One to three random changes to a message, mostly inside one frame."""
    frames = list(frames)
    for _ in range(rng.randint(1, 3)):
        if not frames:
            break
        i = rng.randrange(len(frames))
        if rng.random() < 0.9:
            frames[i] = rng.choice(BYTE_CHANGES)(rng, frames[i])
        else:
            rng.choice(FRAME_CHANGES)(rng, frames, i)
    return frames


def _flip(rng: random.Random, data: bytes) -> bytes:
    i = rng.randrange(len(data) + 1)
    return data[:i] + bytes([rng.randrange(256)]) + data[i + 1 :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _insert(rng: random.Random, data: bytes) -> bytes:
    i = rng.randrange(len(data) + 1)
    return data[:i] + rng.choice(HOSTILE) + data[i:]


def _overwrite(rng: random.Random, data: bytes) -> bytes:
    i, hostile = rng.randrange(len(data) + 1), rng.choice(HOSTILE)
    return data[:i] + hostile + data[i + len(hostile) :]


def _random(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.randrange(64))


HOSTILE = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map of that size
    b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
    b"\xdb\xff\xff\xff\xff",  # and of text
    b"\xc9\x00\x00\x00\x01\x01x",  # extension types
    b"\xd4\xff\x00",
    b"\x91" * 3000,  # nesting
    b"\x81\xa1k" * 2000,
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",  # infinity
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",  # 2**64 - 1
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",  # -2**63
    b"\xa2\xff\xfe",  # no UTF-8
    b"\xc0",
    b"\xc1",
    b"\x80",
    b"\x90",
]

BYTE_CHANGES: list[Callable[[random.Random, bytes], bytes]] = [
    _flip,
    _cut,
    _insert,
    _overwrite,
    _random,
]

FRAME_CHANGES: list[Callable[[random.Random, list[bytes], int], None]] = [
    lambda rng, frames, i: frames.__delitem__(i),
    lambda rng, frames, i: frames.insert(i, rng.randbytes(rng.randrange(32))),
    lambda rng, frames, i: frames.append(frames[i]),
    lambda rng, frames, i: rng.shuffle(frames),
]
