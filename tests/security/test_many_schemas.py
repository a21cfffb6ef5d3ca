"""A thousand languages at once: each request gets its own, or its own refusal."""

import asyncio
import json
import re
import statistics
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.server import Server, running_server
from tests.helpers.streams import completion_body

NUM_REQUESTS = 1000
NUM_TOGETHER = 16


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("scripted", "--served-model-name", "m") as server:
        yield server


def wish(number: int) -> dict[str, Any]:
    """A language of its own; of each ten one that cannot be compiled, which only the engine sees
    (`a(?=b)`), or that is refused before."""
    if number % 20 == 0:
        return {"structured_outputs": {"regex": f"a(?=b{number})"}}
    if number % 20 == 10:
        return {"structured_outputs": {"json": {"type": f"banana{number}"}}}
    return {"structured_outputs": {"regex": f"no {number} [a-f]{{3}}"}}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.row("F-40", "S-23", "S-26")
def test_only_the_broken_ones_of_a_thousand_languages_fail(server: Server) -> None:
    """And who asks for none does not wait for their compiler: fewer of them end meanwhile than are
    under way, which says the same on a machine with other work."""
    answers, overtaken = asyncio.run(_ask_all(server))

    for number, answer in enumerate(answers):
        if number % 10 == 0:
            assert answer.status_code == 400, (number, answer.text)
            assert answer.json()["error"]["param"].startswith("structured_outputs")
        else:
            [choice] = answer.json()["choices"]
            assert re.fullmatch(f"no {number} [a-f]{{3}}", choice["text"]), choice
    assert len(overtaken) > 10
    assert statistics.median(overtaken) < NUM_TOGETHER / 2, overtaken


async def _ask_all(server: Server) -> tuple[list[httpx.Response], list[int]]:
    """The answers in order; and of each plain request that was sent meanwhile, how many of the
    others ended before it did."""
    overtaken: list[int] = []
    num_ended = 0
    places = asyncio.Semaphore(NUM_TOGETHER)
    limits = httpx.Limits(max_connections=NUM_TOGETHER + 1)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=120, trust_env=False, limits=limits
    ) as client:

        async def ask(number: int) -> httpx.Response:
            nonlocal num_ended
            async with places:
                body = completion_body(max_tokens=40, **wish(number))
                answer = await client.post("/v1/completions", content=json.dumps(body))
                num_ended += 1
                return answer

        async def probe() -> None:
            while True:
                before = num_ended
                answer = await client.post("/v1/completions", json=completion_body(max_tokens=1))
                assert answer.status_code == 200
                overtaken.append(num_ended - before)

        await ask(1)  # reads the vocabulary
        probing = asyncio.create_task(probe())
        answers = await asyncio.gather(*map(ask, range(NUM_REQUESTS)))
        probing.cancel()
    return list(answers), overtaken
