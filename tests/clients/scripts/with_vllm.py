"""`vllm bench serve`: what its command runs, on both routes.

The command itself asks pip for the version of `vllm`, which the packages for CPUs do not bear.
"""

import sys
from typing import Any

from steps import main, server, step
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

NUM_PROMPTS = 24
INPUT_LEN, OUTPUT_LEN = 40, 16


def bench(*flags: str) -> dict[str, Any]:
    of_server = ["--base-url", server("endless", ""), "--model", "m", "--tokenizer", sys.argv[2]]
    load = ["--dataset-name", "random", "--num-prompts", str(NUM_PROMPTS), "--max-concurrency", "4"]
    lengths = ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN)]
    shown = ["--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"]
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    found: dict[str, Any] = serve.main(
        parser.parse_args([*of_server, *load, *lengths, *shown, *flags])
    )
    return {
        "requests": [found["completed"], found["failed"]],
        "output_tokens": found["total_output_tokens"] / NUM_PROMPTS / OUTPUT_LEN,
        "input_tokens": found["total_input_tokens"] / NUM_PROMPTS / INPUT_LEN,
        "is_streamed": bool(0 < found["median_ttft_ms"] < found["median_e2el_ms"]),
    }


@step
def completes() -> Any:
    return bench("--backend", "openai", "--endpoint", "/v1/completions")


@step
def chats() -> Any:
    return bench("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")


if __name__ == "__main__":
    main()
