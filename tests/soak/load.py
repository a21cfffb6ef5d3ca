"""Clients that keep a server busy, each with its own order of requests, from a seed.

They run on an event loop in a thread of their own, so that faults can be dealt out beside them.
"""

import asyncio
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

import aiohttp

from tests.helpers.server import wait_for
from tests.soak.answers import Answer
from tests.soak.cases import Case
from tests.soak.exchange import Exchange, ask
from tests.soak.parts import Part

Twins = dict[str, Answer]
"""By the name of the case: what it is answered while nothing is wrong."""


def make_twins(url: str, cases: Sequence[Case], part: Part) -> Twins:
    """Have each case answered, and check that it is answered as promised.

    Raises:
        AssertionError: it is not.
    """

    async def run() -> list[Exchange]:
        room = asyncio.Semaphore(part.num_clients)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session:

            async def one(case: Case) -> Exchange:
                async with room:
                    return await ask(session, url, case, False, limit_s=part.limit_s)

            return list(await asyncio.gather(*map(one, cases)))

    exchanges = asyncio.run(run())
    for exchange in exchanges:
        expected = "refused" if exchange.case.promise == "refusal" else "whole"
        assert exchange.end == expected, f"{exchange.case}: {exchange.end} {exchange.why}"
    return {
        exchange.case.name: exchange.answer
        for exchange in exchanges
        if exchange.case.promise == "answer"
    }


class Load:
    """Clients of one server, or of those that follow each other at one address.

    Args:
        url: of the server.
        cases: what they ask for.
        twins: the right answers.
        seed: of the order in which each asks.
        part: says how many there are, and how long they wait.
    """

    def __init__(
        self,
        url: str,
        cases: Sequence[Case],
        twins: Twins,
        seed: int,
        part: Part,
    ) -> None:
        self._url = url
        self._cases = cases
        self._twins = twins
        self._seed = seed
        self._part = part
        self._is_over = False
        self.exchanges: list[Exchange] = []
        """All that have ended; the answers of those that were right are not kept."""
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Exchanges by their end, and `compared`: answers equal to their twins."""
        self.num_tokens = 0
        self.wrong: list[str] = []
        """Answers that are not what they must be whatever happens."""
        self._failure: BaseException | None = None
        """What has ended the clients before their time."""
        self._thread = threading.Thread(target=self._run, name="load")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more, and wait until all is answered."""
        self._is_over = True
        self._thread.join(self._part.limit_s + 10.0)
        wait_for(lambda: not self._thread.is_alive(), "all clients have ended", 5.0)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._keep_busy())
        except BaseException as error:  # noqa: BLE001  # a run without load proves nothing: `stop`
            self._failure = error

    async def _keep_busy(self) -> None:
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0)
            ) as session,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._part.num_clients):
                group.create_task(self._be_client(session, random.Random(f"{self._seed} {number}")))

    async def _be_client(self, session: aiohttp.ClientSession, draws: random.Random) -> None:
        while not self._is_over:
            case = draws.choice(self._cases)
            is_streamed = draws.random() < 0.7
            leaves = case.promise != "refusal" and draws.random() < 0.1
            leave_after = draws.randint(1, 20) if is_streamed else draws.randint(1, 3)
            exchange = await ask(
                session,
                self._url,
                case,
                is_streamed,
                leave_after if leaves else None,
                self._part.limit_s,
            )
            self._judge(exchange)
            if exchange.end in ("broken", "error", "down"):
                await asyncio.sleep(0.5)  # as clients do before they try again

    def _judge(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        self.counts[exchange.end] += 1
        self.num_tokens += exchange.answer.num_tokens
        match exchange.end:
            case "improper" | "hung":
                self._complain(exchange, exchange.why)
            case "refused" if exchange.case.promise != "refusal":
                self._complain(exchange, f"refused: {exchange.why}")
            case "whole" if exchange.case.promise == "refusal":
                self._complain(exchange, "answered, not refused")
            case "whole" if exchange.case.promise == "answer":
                twin = self._twins[exchange.case.name]
                difference = exchange.answer.difference(twin, self._part.tolerance)
                if difference is None:
                    self.counts["compared"] += 1
                    exchange.answer = Answer()
                else:
                    self._complain(exchange, difference)

    def _complain(self, exchange: Exchange, why: str) -> None:
        how = "streamed" if exchange.is_streamed else "at once"
        self.wrong.append(
            f"{time.strftime('%H:%M:%S')} {exchange.case.name}, {how},"
            f" after {exchange.ended_at - exchange.began_at:.1f} s: {why};"
            f" asked {json.dumps(exchange.case.body)[:300]}"
        )
