"""Sends the requests of a batch, so many at a time, and hands each result over as soon as it is
there.

A refusal that concerns the request is its result. One that concerns the server, because it is busy,
loading or gone for a moment, is none: the request is sent again, as long as the server answers
anything at all within `PATIENCE_S`. An answer may take hours, where much is asked, so nobody waits
for one with a deadline. But a server that answers nothing, not even what needs no model, hangs.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator

import aiohttp

from cluster.api_client import ApiClient, error_message, reason
from cluster.batch.lines import BadLine, BatchRequest, Line, Result, answered, failed
from engine.errors import ServerError

PATIENCE_S = 300.0
"""From the last answer of any request."""

LOOK_S = 30.0
"""After so long without any answer we look whether the server does anything at all."""

_SERVERS_FAULT = frozenset({429, 502, 503, 504})
_MAX_PAUSE_S = 10.0


class ServerGoneError(ServerError):
    """The server does not answer any more. What has no result yet can be sent to the next one."""


class BatchRunner:
    """Sends lines and reports their results.

    Args:
        client: of the server.
        on_result: called for each line once; what it raises ends the run.
        patience_s: seconds without any answer after which the server is given up.
        look_s: seconds without any answer after which we look whether there is a server at all,
            and which it has to answer.
    """

    def __init__(
        self,
        client: ApiClient,
        on_result: Callable[[Result], None],
        patience_s: float = PATIENCE_S,
        look_s: float = LOOK_S,
    ) -> None:
        self._client = client
        self._on_result = on_result
        self._patience_s = patience_s
        self._look_s = look_s
        self._last_answer_s = time.monotonic()

    async def run(self, lines: Iterator[Line], max_concurrency: int) -> None:
        """Send all `lines`, at most so many at a time.

        Raises:
            ServerGoneError: the server has not answered for too long.
        """
        self._last_answer_s = time.monotonic()
        tasks = [asyncio.create_task(self._work(lines)) for _ in range(max_concurrency)]
        work = asyncio.gather(*tasks)
        watch = asyncio.create_task(self._watch(), name="watch")
        # Whatever the watch finds ends the work.
        watch.add_done_callback(lambda _: work.cancel())
        try:
            await work
        except asyncio.CancelledError:
            if watch.done() and not watch.cancelled():
                await watch  # raises what it has found
            raise
        finally:
            for task in (*tasks, watch):
                task.cancel()
            await asyncio.gather(*tasks, watch, return_exceptions=True)

    async def _watch(self) -> None:
        """Ends with ServerGoneError when nothing at all has been answered for too long."""
        look_s = self._look_s
        last_sign_s = time.monotonic()
        while True:
            await asyncio.sleep(look_s)
            last_sign_s = max(last_sign_s, self._last_answer_s)
            if time.monotonic() - last_sign_s < look_s:
                continue
            if await self._client.answers(look_s):
                last_sign_s = time.monotonic()
            elif time.monotonic() - last_sign_s > self._patience_s:
                raise ServerGoneError(f"no answer to anything within {self._patience_s:.0f} s")

    async def _work(self, lines: Iterator[Line]) -> None:
        for line in lines:
            result = failed(line) if isinstance(line, BadLine) else await self._send(line)
            self._on_result(result)

    async def _send(self, request: BatchRequest) -> Result:
        num_tries = 0
        while True:
            try:
                async with self._client.post(request.url, request.body) as response:
                    content = await response.read()
            except (aiohttp.ClientError, OSError) as error:
                problem, retry_after_s = reason(error), None
            else:
                if response.status not in _SERVERS_FAULT:
                    self._last_answer_s = time.monotonic()
                    request_id = response.headers.get("X-Request-ID")
                    return answered(request, response.status, request_id, content)
                problem = error_message(response.status, content)
                retry_after_s = _seconds(response.headers.get("Retry-After", ""))
            if time.monotonic() - self._last_answer_s > self._patience_s:
                raise ServerGoneError(f"no answer within {self._patience_s:.0f} s: {problem}")
            await asyncio.sleep(_pause_s(num_tries, retry_after_s))
            num_tries += 1


def _pause_s(num_tries: int, retry_after_s: float | None) -> float:
    """How long to wait before the next try. Not the same for all, who would come back at once."""
    pause_s = 0.25 * 2 ** min(num_tries, 10) if retry_after_s is None else retry_after_s
    return min(pause_s, _MAX_PAUSE_S) * random.uniform(0.75, 1.25)


def _seconds(text: str) -> float | None:
    return float(text) if text.isdecimal() else None
