"""GuideLLM, in an environment of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import run
from tests.clients.servers import Servers, endless_model

CLIENT = "guidellm"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_REQUESTS = 12
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16


@pytest.mark.parametrize("request_format", ["/v1/completions", "/v1/chat/completions"])
def test_measures(python: Path, servers: Servers, tmp_path: Path, request_format: str) -> None:
    """All requests succeed with as many tokens as were asked for."""
    [benchmark] = guidellm(python, servers, tmp_path, request_format)["benchmarks"]

    requests = benchmark["requests"]
    assert benchmark["scheduler_state"]["errored_requests"] == 0
    assert benchmark["scheduler_state"]["successful_requests"] == NUM_REQUESTS
    assert not requests["errored"]
    assert {each["output_tokens"] for each in requests["successful"]} == {OUTPUT_TOKENS}
    assert all(each["prompt_tokens"] >= PROMPT_TOKENS for each in requests["successful"])


def guidellm(python: Path, servers: Servers, folder: Path, request_format: str) -> dict[str, Any]:
    tokenizer = endless_model(servers.folder)
    backend = f"kind=openai_http,target={servers['endless'].url},request_format={request_format}"
    lengths = f"prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    load = ["--profile", "kind=concurrent,streams=4", "--data", f"kind=synthetic_text,{lengths}"]
    limits = ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    of_model = ["--backend", backend, "--tokenizer", f"kind=hf_auto,model={tokenizer}"]
    run(python, ["-m", "guidellm", "run", *of_model, *load, *limits], folder)
    found: dict[str, Any] = json.loads((folder / "benchmarks.json").read_text())
    return found
