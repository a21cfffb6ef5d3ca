"""`--only model,float32`: decode steps and prefills of a real model by the `LLM` class, in turns.

Each engine's class is loaded once and stays up. Decode: prompts of 129 tokens are computed once and
stay in the prefix cache (vLLM's blocks hold 128 tokens on CPU), so a call for n tokens is n decode
steps; what a call costs by itself is taken off by one for a single token:

    step = (time of n tokens - time of 1) / (n - 1)

Prefill: a call for one token of a prompt that nobody has seen.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.bench.offline_run import Prompts
from tests.bench import limits
from tests.bench.engines import Engine, wait_at_rest
from tests.bench.figures import Figure, Recorder, turns
from tests.bench.obedient import Obedient

CONTEXT = 129
BLOCK = 128
"""Tokens of a prompt that any engine has cached by then: whole blocks, and not the last token."""
PREFILLS = (128, 1024)
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
MAX_BATCH = 32


@dataclass(frozen=True, slots=True)
class ModelSettings:
    folder: Path
    repeats: int
    logs: Path


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of decode step."""

    key: str
    batch: int
    sampling: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        """Of a call: fewer where a step takes long."""
        return 16 if self.batch == MAX_BATCH else 32


GREEDY_CASES = [Case(f"decode-{size}", size, GREEDY) for size in (1, 8, 32)]
CASES = [*GREEDY_CASES, *(Case(f"sampled-{size}", size, SAMPLED) for size in (8, 32))]


def measure_model(
    engines: Sequence[Engine], settings: ModelSettings, say: Callable[[str], None]
) -> dict[str, Figure]:
    """All rows of decode and prefill."""
    machine = limits.measure(engines[0].environ)
    recorder = Recorder()
    _measure(engines, CASES, settings, recorder, say)
    work = limits.model_work(settings.folder)
    for case in CASES:
        recorder.limit(case.key, work.decode_ms(machine, case.batch))
    for length in PREFILLS:
        recorder.limit(f"prefill-{length}", work.prefill_ms(machine, length))
    return recorder.figures()


def measure_float32(
    engines: Sequence[Engine], settings: ModelSettings, say: Callable[[str], None]
) -> dict[str, Figure]:
    """The same beside the peer in float32, if there is one: where a processor has no arithmetic for
    bf16, that is what its users would choose. Ours stays as it is."""
    if len(engines) == 1:
        return {}
    ours, *peers = engines
    in_float32 = [replace(peer, dtype="float32") for peer in peers]
    recorder = Recorder()
    _measure([ours, *in_float32], GREEDY_CASES, settings, recorder, say)
    return {f"float32-{key}": figure for key, figure in recorder.figures().items()}


def _measure(
    engines: Sequence[Engine],
    cases: Sequence[Case],
    settings: ModelSettings,
    recorder: Recorder,
    say: Callable[[str], None],
) -> None:
    with ExitStack() as stack:
        children = {}
        for engine in engines:
            arguments = {
                "engine": engine.name.lower(),
                "model": str(settings.folder),
                "options": {**llm_options(), "dtype": engine.dtype},
            }
            say(f"{engine.name} loads")
            children[engine] = stack.enter_context(
                engine.commands("llm_commands.py", arguments, settings.logs)
            )
        run = Turns(children, settings, recorder, say)
        for case in cases:
            run.decode(case)
        for length in PREFILLS:
            run.prefill(f"prefill-{length}", length)


def llm_options() -> dict[str, Any]:
    """Of either class."""
    return {
        "max_model_len": max(PREFILLS) + BLOCK,
        "max_num_seqs": MAX_BATCH,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
    }


class Turns:
    """Loaded engines that take turns at the same prompts."""

    def __init__(
        self,
        children: Mapping[Engine, Obedient],
        settings: ModelSettings,
        recorder: Recorder,
        say: Callable[[str], None],
    ) -> None:
        self._children = children
        self._settings = settings
        self._recorder = recorder
        self._say = say
        self._fresh = {
            length: Prompts(str(settings.folder), length, seed=length) for length in PREFILLS
        }
        prompts = Prompts(str(settings.folder), CONTEXT)
        self._cached = [item["prompt_token_ids"] for item in prompts.take(MAX_BATCH)]
        self._num_cached = dict.fromkeys(children, 0)

    def decode(self, case: Case) -> None:
        prompts = self._cached[: case.batch]
        for engine, child in self._children.items():
            self._fill(engine, child, case.batch)
            _generate(child, prompts, 2, case.sampling)  # for the first time like this

        def measure(child: Obedient) -> float:
            length = case.num_tokens
            one_s = _generate(child, prompts, 1, case.sampling, is_cached=True)
            all_s = _generate(child, prompts, length, case.sampling, is_cached=True)
            return (all_s - one_s) / (length - 1) * 1e3

        self._take(case.key, measure)

    def prefill(self, key: str, length: int) -> None:
        def prompts() -> list[list[int]]:
            return [item["prompt_token_ids"] for item in self._fresh[length].take(1)]

        for child in self._children.values():
            _generate(child, prompts(), 1, GREEDY)
        self._take(key, lambda child: _generate(child, prompts(), 1, GREEDY) * 1e3)

    def _take(self, key: str, measure: Callable[[Obedient], float]) -> None:
        for number in turns(self._settings.repeats):
            for engine, child in self._children.items():
                others = [each.tree for each in self._children.values() if each is not child]
                wait_at_rest(*others)
                with self._recorder.turn(engine.side, *others) as found:
                    found[key] = measure(child)
                self._say(f"{key} {number + 1}, {engine.name}: {found[key]:.1f}")

    def _fill(self, engine: Engine, child: Obedient, count: int) -> None:
        """Compute prompts that it has not seen yet."""
        if new := self._cached[self._num_cached[engine] : count]:
            self._say(f"{len(new)} prompts into the cache, {engine.name}")
            _generate(child, new, 1, GREEDY)
            self._num_cached[engine] = count


def _generate(
    child: Obedient,
    prompts: list[list[int]],
    num_tokens: int,
    sampling: Mapping[str, float],
    *,
    is_cached: bool = False,
) -> float:
    """Seconds it took."""
    answer = child.ask("generate", prompts=prompts, num_tokens=num_tokens, sampling=dict(sampling))
    if is_cached and min(answer["cached"]) < BLOCK:
        raise RuntimeError(f"prompts are not in the cache: {answer['cached']}")
    return float(answer["took_s"])
