"""Right tokens through the whole system: greedy float32 equals plain transformers, token by token.

Every architecture, alone and in a mixed batch, under everything that reorders or cuts the work.
`tests/workers` proves the arithmetic of each architecture in one process; here the scheduler, both
wires and real worker processes take part. A few combinations run always, all of them in
`make test-slow`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from api import LLM, SamplingParams
from api.llm import CompletionOutput
from tests.helpers.tiny_models import ARCHITECTURES, clear_prompts, greedy_tokens, tiny_model

NUM_TOKENS = 12
NUM_PROMPTS = 20
BATCH = 32

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "uncached": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 16, "block_size": 8},
    "preempted": {"num_gpu_blocks_override": 24, "block_size": 4},
    "all at once": {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": 24,
        "block_size": 4,
    },
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2 pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
"""What may not change a token."""

# Each has a model to load. The others are in `make test-slow`; every architecture in every way, but
# without wires and scheduler, is in tests/workers.
ALWAYS = {
    ("llama", "default"),
    ("gemma3", "all at once"),
    ("gpt2", "tp 2"),
    ("qwen3", "pp 2"),
}


def combinations() -> list[Any]:
    return [
        pytest.param(
            (architecture, way),
            id=f"{architecture}-{way.replace(' ', '-')}",
            marks=() if (architecture, way) in ALWAYS else pytest.mark.slow,
        )
        for architecture in ARCHITECTURES
        for way in WAYS
    ]


@dataclass(frozen=True)
class Started:
    """A model, loaded in one of the ways."""

    llm: LLM
    folder: Path
    has_little_cache: bool


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=combinations())
def started(request: pytest.FixtureRequest, models: Path) -> Iterator[Started]:
    architecture, way = request.param
    folder = tiny_model(architecture, models)
    with LLM(str(folder), dtype="float32", **WAYS[way]) as llm:
        yield Started(llm, folder, "num_gpu_blocks_override" in WAYS[way])


def test_tokens_are_those_of_transformers(started: Started) -> None:
    """20 prompts, first one by one and then all in one batch with twelve more; where there is
    little cache, with preemptions."""
    prompts = clear_prompts(started.folder, NUM_PROMPTS, NUM_TOKENS)
    expected = [greedy_tokens(started.folder, prompt, NUM_TOKENS) for prompt in prompts]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    mixed = [prompts[i % NUM_PROMPTS] for i in range(BATCH)]

    alone = [generate(started, [prompt], greedy)[0] for prompt in prompts]
    together = generate(started, mixed, greedy)

    assert tokens(alone) == expected
    assert tokens(together) == [expected[i % NUM_PROMPTS] for i in range(BATCH)]
    assert (num_preemptions(together) > 0) == started.has_little_cache


def test_seeded_tokens_do_not_depend_on_the_batch(started: Started) -> None:
    """Drawn alone and again among others that draw as well: the same tokens, and not the likeliest
    ones."""
    prompts = clear_prompts(started.folder, NUM_PROMPTS, NUM_TOKENS)
    seeded = [
        SamplingParams(temperature=3.0, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
        for seed in range(4)
    ]
    unseeded = SamplingParams(temperature=3.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    others = [unseeded] * (NUM_PROMPTS - len(seeded))

    alone = [generate(started, [prompts[i]], [seeded[i]])[0] for i in range(len(seeded))]
    together = generate(started, prompts, [*seeded, *others])

    assert tokens(together)[: len(seeded)] == tokens(alone)
    assert tokens(alone)[0] != greedy_tokens(started.folder, prompts[0], NUM_TOKENS)


def generate(
    started: Started, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[CompletionOutput]:
    """Continue the prompts, all in one batch."""
    outputs = started.llm.generate(list(prompts), params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def tokens(outputs: list[CompletionOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def num_preemptions(outputs: list[CompletionOutput]) -> int:
    """How often a sequence had to give way, by the engine core's own account."""
    return sum(output.timeline.num_preemptions for output in outputs if output.timeline)
