"""Right tokens through the whole system: greedy float32 equals plain transformers, token by token.

Every architecture, alone and in a mixed batch, under everything that reorders or cuts the work.
`tests/workers` proves the arithmetic of each architecture in one process; here the scheduler, both
wires and real worker processes take part. A few combinations run always, all of them in
`make test-slow`.
"""

from pathlib import Path
from typing import Any

import pytest

from api import LLM, SamplingParams
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

ALWAYS = {
    ("llama", "default"),
    ("gemma3", "default"),
    ("gpt2", "default"),
    ("llama", "all at once"),
    ("gemma3", "all at once"),
    ("qwen2", "tp 2"),
    ("gpt2", "tp 2"),
    ("mistral", "pp 2"),
    ("qwen3", "pp 2"),
}


def combinations() -> list[Any]:
    return [
        pytest.param(
            architecture,
            way,
            id=f"{architecture}-{way.replace(' ', '-')}",
            marks=() if (architecture, way) in ALWAYS else pytest.mark.slow,
        )
        for architecture in ARCHITECTURES
        for way in WAYS
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("architecture", "way"), combinations())
def test_tokens_are_those_of_transformers(models: Path, architecture: str, way: str) -> None:
    """20 prompts, first one by one and then all in one batch with twelve more."""
    folder = tiny_model(architecture, models)
    prompts = clear_prompts(folder, NUM_PROMPTS, NUM_TOKENS)
    expected = [greedy_tokens(folder, prompt, NUM_TOKENS) for prompt in prompts]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    mixed = [prompts[i % NUM_PROMPTS] for i in range(BATCH)]

    with LLM(str(folder), dtype="float32", **WAYS[way]) as llm:
        alone = [tokens(llm, [prompt], greedy)[0] for prompt in prompts]
        together = tokens(llm, mixed, greedy)

    assert alone == expected
    assert together == [expected[i % NUM_PROMPTS] for i in range(BATCH)]


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """The generated token ids, by prompt."""
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
