"""UTILITY over the real wires: from an engine client through the core to its workers and back."""

import asyncio
from pathlib import Path

from api.input_processor import InputProcessor
from api.sampling import SamplingParams
from api.tokenizer import Tokenizer
from cluster.config import EngineOptions
from cluster.library import Engines, start_engines
from engine.utility import Statistics
from tests.helpers.outputs import read


async def generate(engines: Engines, inputs: InputProcessor, prompt: list[int]) -> int:
    """Run one greedy request; how many of its prompt tokens were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=4)
    [request] = inputs.make_requests(prompt, params)
    num_cached = 0
    for output in await read(engines.client.stream(request)):
        if output.details is not None and output.details.prefill_stats is not None:
            num_cached = output.details.prefill_stats.num_cached_tokens
    return num_cached


async def use_all_methods(engines: Engines, traces: Path) -> None:
    client = engines.client
    [ready] = await client.wait_ready(90)
    engines.connected()
    inputs = InputProcessor(
        Tokenizer.load(engines.model.path),
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
    )
    prompt = list(range(64, 64 + 4 * ready.block_size))

    assert await generate(engines, inputs, prompt) == 0
    assert await generate(engines, inputs, prompt) == 3 * ready.block_size
    assert await client.utility("reset_prefix_cache") == [True]
    assert await generate(engines, inputs, prompt) == 0

    [statistics] = await client.utility("statistics")
    assert isinstance(statistics, Statistics)
    assert statistics.scheduler.num_generation_tokens == 12
    assert statistics.scheduler.num_running == 0
    assert [worker.rank for worker in statistics.workers] == [0, 1]
    assert all(worker.num_steps == 12 for worker in statistics.workers)

    await client.utility("profile", True, str(traces))
    await generate(engines, inputs, prompt)
    await client.utility("profile", False, str(traces))
    client.close()


def test_all_methods_end_to_end(tmp_path: Path) -> None:
    """Statistics of both workers, a prefix-cache reset that is felt, and a trace file per rank."""
    engines = start_engines(EngineOptions(model="scripted", tensor_parallel_size=2))
    try:
        asyncio.run(use_all_methods(engines, tmp_path))
    finally:
        engines.close()
    assert len(list(tmp_path.iterdir())) == 2
