"""An engine client on an event loop, connected to engine cores that a test has started."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from api.engine_client import EngineClient
from engine.bound import ServerWires
from engine.sampling_params import SamplingParams
from engine.wire import EngineCoreRequest

TIMEOUT_S = 20.0


def run_once(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


@contextlib.asynccontextmanager
async def connected(
    wires: ServerWires, num_engines: int = 1, **options: Any
) -> AsyncIterator[EngineClient]:
    client = EngineClient(num_engines, **options)
    client.bind(wires)
    try:
        await client.wait_ready(TIMEOUT_S)
        yield client
    finally:
        client.close()


def make_request(request_id: str = "r", **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=np.arange(3, dtype="<u4"),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=100),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=fields.pop("data_parallel_rank", None),
        **fields,
    )


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds, while the loop runs."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
