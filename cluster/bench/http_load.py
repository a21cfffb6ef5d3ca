"""A light client that keeps so many streamed completions in flight, and times every event.

Asyncio streams and no HTTP library: it shares the machine with the server that it measures.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class LoadResult:
    concurrency: int
    num_requests: int
    wall_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    """From sending a request to its first event."""
    between_tokens_s: list[float] = field(default_factory=list)
    """Between events of one stream."""
    num_tokens: int = 0

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class Workload:
    model: str
    prompt_tokens: int
    output_tokens: int
    low: int
    high: int
    """Token ids of prompts are drawn from `low` to below `high`."""


def run_load(port: int, workload: Workload, concurrency: int, num_requests: int) -> LoadResult:
    """Send requests, `concurrency` at a time."""
    return asyncio.run(_run(port, workload, concurrency, num_requests))


async def _run(port: int, workload: Workload, concurrency: int, num_requests: int) -> LoadResult:
    result = LoadResult(concurrency, num_requests)
    noise = random.Random(concurrency)
    bodies = [_body(workload, noise) for _ in range(num_requests)]

    async def work() -> None:
        while bodies:
            await _stream(port, bodies.pop(), workload.output_tokens, result)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    result.wall_s = time.perf_counter() - began
    return result


def _body(workload: Workload, noise: random.Random) -> dict[str, Any]:
    return {
        "model": workload.model,
        "prompt": noise.choices(range(workload.low, workload.high), k=workload.prompt_tokens),
        "max_tokens": workload.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _stream(port: int, body: dict[str, Any], num_tokens: int, result: LoadResult) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    sent = last = time.perf_counter()
    writer.write(head.encode() + content)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r}: {(await reader.read(4096)).decode(errors='replace')}")
    usage = None
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len(b"data: ") :])
        usage = event.get("usage") or usage
        if not event["choices"]:
            continue
        now = time.perf_counter()
        (result.first_token_s if last == sent else result.between_tokens_s).append(now - last)
        last = now
    writer.close()
    await writer.wait_closed()
    if usage is None or usage["completion_tokens"] != num_tokens:
        raise RuntimeError(f"wanted {num_tokens} tokens, usage says {usage}")
    result.num_tokens += num_tokens
