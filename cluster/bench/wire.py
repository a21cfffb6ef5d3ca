"""`raywire bench wire`: wire 1 there and back, and what its messages cost to encode and decode.

The client of an API server, and a real engine process over workers that answer at once. Over ipc,
over TCP on loopback, and over TCP as it is between nodes, encrypted. A call is the smallest message
each way (UTILITY `reset_prefix_cache`). A request is ADD of 128 tokens (or as many as are asked
for: 256 make 1 KiB) up to its first output, through the scheduler. Each round does one of both on
each wire, one after the other, so that all have the same machine.
"""

import asyncio
import contextlib
import dataclasses
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import uvloop

from api.engine_client import EngineClient
from cluster.addresses import WireBinder, ipc_folder, wire_config
from cluster.bench import codec_times, machine
from cluster.bench.instant_workers import engine_config, make_request, start_instant_workers
from cluster.bench.results import Measured, Results
from engine import process
from engine.bound import ServerWires
from engine.curve import CurveKeys

PROMPT_TOKENS = 128
_NUM_WARM_UP = 50
_START_TIMEOUT_S = 60.0
_LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class Trips:
    """Of one wire, in microseconds."""

    wire: str
    calls: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)


def measure_wire(rounds: int, repeats: int, prompt_tokens: int = PROMPT_TOKENS) -> Results:
    figures: dict[str, list[list[float]]] = defaultdict(list)
    with machine.watch() as load:
        for _ in range(repeats):
            for trips in measure_trips(rounds, prompt_tokens):
                figures[f"call, {trips.wire}"].append(trips.calls)
                figures[f"request to first output, {trips.wire}"].append(trips.requests)
            for name, samples in codec_times.measure().items():
                figures[name].append(samples)
    return Results(
        "wire",
        {"rounds": rounds, "repeats": repeats, "prompt_tokens": prompt_tokens},
        [Measured(name, "µs", samples) for name, samples in figures.items()],
        load,
        notes=["`as lists` is msgspec alone, with token ids as a list of integers"],
    )


def measure_trips(num_rounds: int, prompt_tokens: int = PROMPT_TOKENS) -> list[Trips]:
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        contextlib.ExitStack() as stack,
    ):
        folder = stack.enter_context(ipc_folder(None))
        encrypted = WireBinder(folder, _LOOPBACK)
        wires = {
            "ipc": WireBinder(folder).api_server(),
            "TCP": dataclasses.replace(encrypted.api_server(), keys=None),
            "TCP, encrypted": encrypted.api_server(),
        }
        clients = {name: stack.enter_context(_client(each)) for name, each in wires.items()}
        return runner.run(_measure(clients, num_rounds, prompt_tokens))


@contextlib.contextmanager
def _client(wires: ServerWires) -> Iterator[EngineClient]:
    """With an engine process at the other end, which may not be ready yet."""
    keys = None if wires.keys is None else CurveKeys.generate()
    client = EngineClient()
    client.bind(wires)
    client.allow([] if keys is None else [keys.public])
    config = dataclasses.replace(engine_config(wire_config([wires])), log_level="WARNING")
    engine = multiprocessing.get_context("spawn").Process(
        target=process.main, args=(config, start_instant_workers, keys)
    )
    engine.start()
    try:
        yield client
    finally:
        client.close()
        engine.kill()
        engine.join()


async def _measure(
    clients: dict[str, EngineClient], num_rounds: int, prompt_tokens: int
) -> list[Trips]:
    for client in clients.values():
        await client.wait_ready(_START_TIMEOUT_S)
    results = {name: Trips(name) for name in clients}
    for number in range(_NUM_WARM_UP + num_rounds):
        for name, client in clients.items():
            call_us, request_us = await _call(client), await _request(client, number, prompt_tokens)
            if number >= _NUM_WARM_UP:
                results[name].calls.append(call_us)
                results[name].requests.append(request_us)
    return list(results.values())


async def _call(client: EngineClient) -> float:
    began = time.perf_counter()
    await client.utility("reset_prefix_cache")
    return (time.perf_counter() - began) * 1e6


async def _request(client: EngineClient, number: int, prompt_tokens: int) -> float:
    prompt = np.random.default_rng(number).integers(0, 5, prompt_tokens, dtype=np.uint32)
    request = make_request(f"request-{number}", prompt, max_tokens=1)
    began = time.perf_counter()
    stream = client.stream(request)
    while not stream.is_finished:
        if stream.take() is None:
            await stream.wakeup.wait()
    return (time.perf_counter() - began) * 1e6
