"""Two and four ranks under loads that are uneven, or should be spread evenly."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import Server, running_server
from tests.helpers.streams import completion_body, metric

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Speaks for ever, at 200 tokens a second."""
    return make_slow_model(tmp_path_factory.mktemp("models"), 0.005)


@pytest.fixture(scope="module", params=[2, 4])
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    flags = ("-dp", str(request.param), "--api-server-count", "1", "--served-model-name", "m")
    with running_server(str(model), *flags) as server:
        yield server


def ask_all(
    server: Server, bodies: Sequence[dict[str, Any]], concurrency: int
) -> list[httpx.Response]:
    """Ask for all of them, so many at a time; the answers in their order."""

    async def run() -> list[httpx.Response]:
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:

            async def ask(body: dict[str, Any]) -> httpx.Response:
                async with gate:
                    return await client.post("/v1/completions", json=body)

            return await asyncio.gather(*map(ask, bodies))

    return asyncio.run(run())


def ranks(answers: Sequence[httpx.Response]) -> Counter[str]:
    """How many each rank has answered."""
    return Counter(answer.headers["x-raywire-route"].partition(";")[0] for answer in answers)


def test_requests_of_very_different_length_all_end(server: Server) -> None:
    """200 of them, 128 at a time, three times; and nothing is left running (I01)."""
    numbers = random.Random(0)
    lengths = [numbers.choice([1, 2, 5, 100]) for _ in range(200)]
    bodies = [completion_body(prompt=f"{i}", max_tokens=n) for i, n in enumerate(lengths)]

    for _ in range(3):
        answers = ask_all(server, bodies, 128)
        assert [a.json()["usage"]["completion_tokens"] for a in answers] == lengths

    assert metric(server, "raywire:num_requests_running") == 0
    assert metric(server, "raywire:num_requests_waiting") == 0


def test_equal_requests_are_spread_evenly(server: Server) -> None:
    """200 of one length, 64 at a time: no rank has a fifth more or less than its share (I03)."""
    bodies = [completion_body(prompt=f"number {i}", max_tokens=40) for i in range(200)]

    counts = ranks(ask_all(server, bodies, 64))

    share = 200 / len(counts)
    assert len(counts) in (2, 4)
    assert all(0.8 * share <= count <= 1.2 * share for count in counts.values()), counts


def test_long_prompts_leave_no_rank_idle_while_others_queue(server: Server) -> None:
    """A few long prompts among short ones: every rank has work to the end (I03)."""
    bodies = [
        completion_body(prompt=f"{i} " * (400 if i % 8 == 0 else 4), max_tokens=20)
        for i in range(160)
    ]

    answers = ask_all(server, bodies, 64)

    assert all(answer.status_code == 200 for answer in answers)
    counts = ranks(answers)
    assert min(counts.values()) > 160 / len(counts) / 2, counts
