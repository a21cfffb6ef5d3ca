"""What this machine could do at most: bytes and arithmetic a second, measured, not looked up.

    python -m tests.bench.limits

Reading: the sum of 512 MiB, which no cache holds. Arithmetic: the best of square matmuls in float32
and bfloat16, which torch's libraries do nearly as fast as the processor can. All cores, the best of
several. Beside it stands what a step of a model has to read and to compute.
"""

import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_READ_BYTES = 1 << 29
_PROBE_SIZE = 256
_SIZES = (1024, 2048)
_NUM_TRIES = 7
_NUM_WAKE_UPS = 500
_TIMEOUT_S = 300.0
_ECHO = """
import os, sys
there, back = map(int, sys.argv[1:])
while os.read(there, 1):
    os.write(back, b"x")
"""


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure could be at most, or at least, on this machine."""

    value: float
    """In the figure's unit."""
    by: str
    """What bounds it."""


def waking_us() -> Limit:
    """To wake another process and to be woken by it: a byte through a pipe, and one back."""
    there, back = os.pipe(), os.pipe()
    words = [sys.executable, "-c", _ECHO, str(there[0]), str(back[1])]
    with subprocess.Popen(words, pass_fds=(there[0], back[1])) as child:

        def round_trip() -> None:
            os.write(there[1], b"x")
            os.read(back[0], 1)

        round_trip()  # waits until it is there
        took_s = statistics.median(_took_s(round_trip) for _ in range(_NUM_WAKE_UPS))
        os.close(there[1])
        os.close(there[0])
        child.wait(_TIMEOUT_S)
    os.close(back[0])
    os.close(back[1])
    return Limit(took_s * 1e6, "two wake-ups through pipes")


def copying_ms(num_bytes: int) -> Limit:
    """To copy so many bytes once to and once from where somebody else reads them."""
    content, shared = bytes(num_bytes), bytearray(num_bytes)

    def copy() -> None:
        shared[:] = content
        bytes(shared)

    return Limit(_best_s(copy) * 1e3, "copying")


def hashing_us(num_tokens: int, block_size: int) -> Limit:
    """SHA-256 of as many blocks of token ids, each with the hash before it."""
    block = bytes(4 * block_size + 32)

    def hash_all() -> None:
        for _ in range(num_tokens // block_size):
            hashlib.sha256(block).digest()

    return Limit(_best_s(hash_all) * 1e6, "SHA-256")


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a dense decoder has to do, whoever computes it. Attention comes on top."""

    layer_params: int
    head_params: int

    def decode_ms(self, machine: Machine, batch: int, bytes_per_param: float = 2) -> Limit:
        """Every weight is read once for the batch, and multiplied for each request."""
        params = self.layer_params + self.head_params
        return _slowest_ms(machine, params * bytes_per_param, 2 * params * batch)

    def prefill_ms(self, machine: Machine, num_tokens: int, bytes_per_param: float = 2) -> Limit:
        """Only the last token needs the head."""
        flop = 2 * (self.layer_params * num_tokens + self.head_params)
        return _slowest_ms(machine, (self.layer_params + self.head_params) * bytes_per_param, flop)

    def tokens_per_s(self, machine: Machine, streams: int, prompt: int, output: int) -> Limit:
        """So many requests at once, each prefilled and decoded with the others."""
        step = self.decode_ms(machine, streams)
        took_ms = streams * self.prefill_ms(machine, prompt).value + output * step.value
        return Limit(streams * output / took_ms * 1e3, step.by)


def _slowest_ms(machine: Machine, num_bytes: float, flop: float) -> Limit:
    reading = Limit(
        num_bytes / machine.bytes_per_s * 1e3, f"memory at {machine.bytes_per_s / 1e9:.0f} GB/s"
    )
    computing = Limit(
        flop / machine.flop_per_s * 1e3, f"arithmetic at {machine.flop_per_s / 1e9:.0f} GFLOP/s"
    )
    return max(reading, computing, key=lambda limit: limit.value)


def model_work(folder: Path) -> ModelWork:
    """From the headers of the weight files."""
    head = layers = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as content:
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            count = math.prod(tensor["shape"])
            if "embed_tokens" in name or "lm_head" in name:
                head = max(head, count)  # an embedding that is not tied is only looked up
            else:
                layers += count
    return ModelWork(layers, head)


def measure(environ: Mapping[str, str]) -> Machine:
    """In a process of its own, which gives the memory back."""
    words = [sys.executable, "-m", "tests.bench.limits"]
    found = subprocess.run(
        words, env=dict(environ), capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    return Machine(**json.loads(found.stdout))


def _best_s(run: Callable[[], object]) -> float:
    return min(_took_s(run) for _ in range(_NUM_TRIES))


def _took_s(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _measure_here() -> Machine:
    import torch  # what imports this module for its arithmetic does without

    def flop_per_s(dtype: torch.dtype, size: int) -> float:
        left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
        return 2 * size**3 / _best_s(lambda: left @ right)

    # A small one first: bfloat16 takes seconds where the processor has no arithmetic for it.
    fastest = max((torch.float32, torch.bfloat16), key=lambda dtype: flop_per_s(dtype, _PROBE_SIZE))
    content = torch.ones(_READ_BYTES // 4)
    return Machine(
        _READ_BYTES / _best_s(content.sum), max(flop_per_s(fastest, size) for size in _SIZES)
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_measure_here())))  # noqa: T201
