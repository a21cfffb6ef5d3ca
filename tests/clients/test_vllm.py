"""`vllm bench serve`, vLLM's own client, in an environment of its own."""

from pathlib import Path

import pytest

from tests.clients.results import Results, run_script
from tests.clients.servers import Servers, endless_model

CLIENT = "vllm"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def results(python: Path, servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Results:
    urls = {"endless": servers["endless"].url}
    tokenizer = str(endless_model(servers.folder))
    return run_script(python, CLIENT, urls, tmp_path_factory.mktemp("vllm"), tokenizer)


@pytest.mark.parametrize("route", ["completes", "chats"])
def test_measures(results: Results, route: str) -> None:
    """All requests succeed with as many tokens as were asked for, streamed."""
    it = results[route]

    assert it["requests"] == [24, 0]
    assert it["output_tokens"] == 1.0
    assert it["input_tokens"] >= 1.0
    assert it["is_streamed"]
