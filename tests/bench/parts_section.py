"""`--only parts`: ring, codec, scheduler, block hashes and the engine's own step, without a model.

The peer's parts run in a process of their own (`vllm_parts`), ours in this one; they take turns.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.bench import codec_times
from cluster.bench.busy import busy_threads
from cluster.bench.ring import RingBench
from cluster.bench.schedule import decode_us, hashing_us
from tests.bench import limits
from tests.bench.engines import Engine, wait_at_rest
from tests.bench.figures import Figure, Recorder, Side
from tests.bench.obedient import Obedient
from tests.helpers.scripted_models import make_slow_model

_ROUNDS = 200
_MODEL_STEP_S = 0.005
_NUM_STEPS = 100
_HASHED_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class PartSettings:
    tiny: Path
    """A model folder that the peer understands."""
    repeats: int
    logs: Path


@dataclass(frozen=True, slots=True)
class Part:
    key: str
    ours: Callable[[], float]
    command: str
    """The peer's."""
    arguments: Mapping[str, int]
    is_busy: bool = False
    """Beside as many busy processes as there are cores."""
    scale: float = 1.0
    """Of microseconds to the row's unit."""


def measure_parts(
    engines: Sequence[Engine], settings: PartSettings, say: Callable[[str], None]
) -> dict[str, Figure]:
    """All rows of parts."""
    recorder = Recorder()
    with ExitStack() as stack:
        rings = {count: RingBench(count, stack) for count in (1, 2)}
        peers = [
            stack.enter_context(
                engine.commands("vllm_parts.py", {"model": str(settings.tiny)}, settings.logs)
            )
            for engine in engines[1:]
        ]
        for part in _parts(rings):
            _take_turns(part, peers, settings.repeats, recorder, say)
    recorder.limit("ring-1k", limits.waking_us())
    recorder.limit("ring-12m", limits.copying_ms(12 << 20))
    copying = limits.copying_ms(100_000 * 4)
    recorder.limit("codec-100k", replace(copying, value=copying.value * 1e3))
    recorder.limit("hash", limits.hashing_us(1000, 16))
    _measure_overhead(settings, recorder, say)
    return recorder.figures()


def _parts(rings: Mapping[int, RingBench]) -> list[Part]:
    def ring(key: str, readers: int, size: int, rounds: int, scale: float = 1.0) -> Part:
        return Part(
            key,
            lambda: statistics.median(rings[readers].round_trips_us(size, rounds)),
            "ring",
            {"num_readers": readers, "num_bytes": size, "rounds": rounds},
            is_busy=key.endswith("busy"),
            scale=scale,
        )

    return [
        ring("ring-1k", 2, 1 << 10, 1000),
        ring("ring-1k-busy", 2, 1 << 10, 100),
        ring("ring-12m", 1, 12 << 20, 20, scale=1e-3),
        *(
            Part(
                f"codec-{count // 1000}k",
                lambda count=count: codec_times.request_us(count),  # type: ignore[misc]
                "codec",
                {"num_tokens": count},
            )
            for count in (1000, 100_000)
        ),
        *(
            Part(
                f"schedule-{count}",
                lambda count=count: statistics.median(  # type: ignore[misc]
                    decode_us(count, _ROUNDS)["step"]
                ),
                "schedule",
                {"running": count, "rounds": _ROUNDS},
            )
            for count in (1, 32, 256)
        ),
        Part(
            "hash",
            lambda: statistics.median(hashing_us(16)),
            "hash",
            {"num_tokens": _HASHED_TOKENS},
        ),
    ]


def _take_turns(
    part: Part,
    peers: Sequence[Obedient],
    repeats: int,
    recorder: Recorder,
    say: Callable[[str], None],
) -> None:
    """The first of each is to warm up, or to start the peer's readers."""
    trees = [peer.tree for peer in peers]
    for number in range(1 + repeats):
        for side, run in _sides(part, peers):
            wait_at_rest(*trees)
            bystanders = trees if side == "ours" else []
            with busy_threads() if part.is_busy else nullcontext():
                if not number:
                    run()
                    continue
                with recorder.turn(side, *bystanders) as found:
                    found[part.key] = run() * part.scale
            say(f"{part.key}, {side}: {found[part.key]:.4g}")


def _sides(part: Part, peers: Sequence[Obedient]) -> list[tuple[Side, Callable[[], float]]]:
    sides: list[tuple[Side, Callable[[], float]]] = [("ours", part.ours)]
    for peer in peers:
        sides.append(
            ("theirs", lambda peer=peer: float(peer.ask(part.command, **part.arguments)))  # type: ignore[misc]
        )
    return sides


def _measure_overhead(
    settings: PartSettings, recorder: Recorder, say: Callable[[str], None]
) -> None:
    """From one step's beginning in the worker to the next one's, less the model's time."""
    from tests.bench.bench_step import start  # torch comes with it: the other sections do without

    model = make_slow_model(settings.logs, step_delay_s=_MODEL_STEP_S)
    for count in (16, 256):
        for number in range(settings.repeats):
            with recorder.turn("ours") as found:
                engine = start(model, True, settings.logs / f"overhead-{count}-{number}.npy")
                try:
                    engine.run(count, _NUM_STEPS, temperature=0.0)
                finally:
                    engine.core.close()
                _, beside_us, _ = engine.figures()
                found[f"overhead-{count}"] = beside_us / 1e3
            say(f"overhead-{count}: {found[f'overhead-{count}']:.3f} ms")
