"""The `LLM` class of an engine, ours or vLLM's, on command. For `obey`: standard library only."""

import importlib
import time
from typing import Any


def open_commands(engine: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Load the model.

    Args:
        engine: "raywire" or "vllm".
        model: a folder.
        options: of the class.
    """
    module: Any = importlib.import_module("api" if engine == "raywire" else "vllm")
    llm = module.LLM(model, **options)
    commands = Commands(llm, module.SamplingParams)
    return {"generate": commands.generate, "score": commands.score}


class Commands:
    def __init__(self, llm: Any, make_params: Any) -> None:
        self._llm = llm
        self._make_params = make_params

    def generate(
        self, prompts: list[list[int]], num_tokens: int, sampling: dict[str, float]
    ) -> dict[str, Any]:
        """Make exactly `num_tokens` for each prompt, all at once. Returns the seconds it took, and
        how many tokens of each prompt came from the prefix cache."""
        params = self._make_params(max_tokens=num_tokens, ignore_eos=True, **sampling)
        began = time.perf_counter()
        outputs = self._llm.generate(_inputs(prompts), params, use_tqdm=False)
        took_s = time.perf_counter() - began
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {num_tokens}:
            raise SystemExit(f"wanted {num_tokens} tokens of each prompt, got {lengths}")
        return {"took_s": took_s, "cached": [output.num_cached_tokens for output in outputs]}

    def score(self, prompts: list[list[int]]) -> float:
        """The sum of log probabilities of all prompt tokens but the first of each."""
        params = self._make_params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        total = 0.0
        for output in self._llm.generate(_inputs(prompts), params, use_tqdm=False):
            ids = output.prompt_token_ids[1:]
            for token_id, position in zip(ids, output.prompt_logprobs[1:], strict=True):
                total += position[token_id].logprob
        return total


def _inputs(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": ids} for ids in prompts]
