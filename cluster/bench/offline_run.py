"""Throughput of one engine's `LLM` class. Runs under its own Python: standard library only.

    python -P offline_run.py --engine raywire|vllm --model FOLDER --out FILE …

Writes a JSON object to FILE. For each batch size, prompts of random token ids are generated from
twice: for one token, which is the prefill, and for all of them. Each repetition has new prompts, so
no prefix cache helps, and the median counts.
"""

import argparse
import importlib
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any


def main() -> None:
    args = parse()
    began = time.perf_counter()
    llm, make_params = load(args)
    loaded_s = time.perf_counter() - began
    prompts = Prompts(args.model, args.prompt_tokens)
    run(llm, make_params, prompts.take(1), 2)
    rows = [measure(llm, make_params, prompts, args, size) for size in args.batches]
    Path(args.out).write_text(json.dumps({"load_s": loaded_s, "rows": rows}), encoding="utf-8")


def measure(llm: Any, make_params: Any, prompts: "Prompts", args: Any, size: int) -> dict[str, Any]:
    """One row: what a batch of `size` prompts takes."""
    run(llm, make_params, prompts.take(size), 2)  # at this size for the first time
    prefill, whole = (
        [run(llm, make_params, prompts.take(size), length) for _ in range(args.repeats)]
        for length in (1, args.output_tokens)
    )
    prefill_s, whole_s = statistics.median(prefill), statistics.median(whole)
    return {
        "batch": size,
        "prefill_tokens_per_s": size * args.prompt_tokens / prefill_s,
        "decode_step_ms": (whole_s - prefill_s) / (args.output_tokens - 1) * 1e3,
        "output_tokens_per_s": size * args.output_tokens / whole_s,
        "prefill_s": prefill,
        "whole_s": whole,
    }


def run(llm: Any, make_params: Any, prompts: list[dict[str, Any]], num_tokens: int) -> float:
    """Seconds of one `generate` call that makes exactly `num_tokens` for each prompt."""
    params = make_params(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took_s = time.perf_counter() - began
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if lengths != {num_tokens}:
        raise SystemExit(f"wanted {num_tokens} tokens of each prompt, got {lengths}")
    return took_s


class Prompts:
    """Random token ids, the same for every engine; never the same prompt twice."""

    def __init__(self, model: str, length: int, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._length = length
        self._ids = range(*token_range(model))

    def take(self, count: int) -> list[dict[str, Any]]:
        return [
            {"prompt_token_ids": self._random.choices(self._ids, k=self._length)}
            for _ in range(count)
        ]


def token_range(model: str) -> tuple[int, int]:
    """First token id of random prompts, and the first above them. Low ids are special tokens in
    many vocabularies, and high ones may have no text."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    vocab_size = config["vocab_size"]
    return min(1000, vocab_size // 4), min(20_000, vocab_size * 3 // 4)


def load(args: Any) -> tuple[Any, Any]:
    """The engine's LLM, loaded, and its class of sampling parameters."""
    limits = {
        "max_model_len": args.prompt_tokens + args.output_tokens,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
    }
    if args.engine == "vllm":
        vllm: Any = importlib.import_module("vllm")  # not there for a type checker
        return vllm.LLM(args.model, **limits), vllm.SamplingParams
    from api import LLM, SamplingParams

    return LLM(args.model, **limits), SamplingParams


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["raywire", "vllm"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
