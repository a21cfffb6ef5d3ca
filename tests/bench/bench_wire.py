"""Wire 1 there and back: the client of an API server, and a real engine process without workers.

    python -m tests.bench.bench_wire [--rounds 1000]

Over ipc, over TCP on loopback, and over TCP as it is between nodes, encrypted. A call is the
smallest message each way (UTILITY `reset_prefix_cache`). A request is ADD of 128 tokens up to its
first output, through the scheduler and a fake executor that answers at once. Each round does one of
both on each wire, one after the other, so that all have the same machine.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import click
import uvloop

from api.engine_client import EngineClient
from cluster.addresses import wire_config
from cluster.bench.percentile import percentile
from engine.bound import ServerWires
from engine.curve import CurveKeys
from tests.helpers.api_peer import make_request, socket_folder
from tests.helpers.core_process import make_config, start_process
from tests.helpers.outputs import read
from tests.helpers.wires import ipc_wires, tcp_wires

PROMPT_TOKENS = 128
NUM_WARM_UP = 50
START_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Trips:
    """Of one wire, in microseconds."""

    wire: str
    calls: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)


def measure_trips(num_rounds: int) -> list[Trips]:
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        contextlib.ExitStack() as stack,
    ):
        wires = {
            "ipc": ipc_wires(stack.enter_context(socket_folder())),
            "TCP": dataclasses.replace(tcp_wires(), keys=None),
            "TCP, encrypted": tcp_wires(),
        }
        clients = {name: stack.enter_context(_client(each)) for name, each in wires.items()}
        return runner.run(_measure(clients, num_rounds))


@contextlib.contextmanager
def _client(wires: ServerWires) -> Iterator[EngineClient]:
    """With an engine process at the other end, which may not be ready yet."""
    keys = None if wires.keys is None else CurveKeys.generate()
    client = EngineClient()
    client.bind(wires)
    client.allow([] if keys is None else [keys.public])
    config = dataclasses.replace(make_config([]), wire=wire_config([wires]), log_level="WARNING")
    process = start_process(config, keys=keys)
    try:
        yield client
    finally:
        client.close()
        process.kill()
        process.join()
        process.close()


async def _measure(clients: dict[str, EngineClient], num_rounds: int) -> list[Trips]:
    for client in clients.values():
        await client.wait_ready(START_TIMEOUT_S)
    results = {name: Trips(name) for name in clients}
    for number in range(NUM_WARM_UP + num_rounds):
        for name, client in clients.items():
            call_us, request_us = await _call(client), await _request(client, number)
            if number >= NUM_WARM_UP:
                results[name].calls.append(call_us)
                results[name].requests.append(request_us)
    return list(results.values())


async def _call(client: EngineClient) -> float:
    began = time.perf_counter()
    await client.utility("reset_prefix_cache")
    return (time.perf_counter() - began) * 1e6


async def _request(client: EngineClient, number: int) -> float:
    request = make_request(f"request-{number}", PROMPT_TOKENS, max_tokens=1)
    began = time.perf_counter()
    await read(client.stream(request))
    return (time.perf_counter() - began) * 1e6


@click.command(help=__doc__)
@click.option("--rounds", default=1000, show_default=True)
def main(rounds: int) -> None:
    click.echo("microseconds          call: 50%    99%   request: 50%    99%")
    for trips in measure_trips(rounds):
        cells = [percentile(each, p) for each in (trips.calls, trips.requests) for p in (50, 99)]
        click.echo("{:<21}{:10.0f}{:7.0f}{:15.0f}{:7.0f}".format(trips.wire, *cells))


if __name__ == "__main__":
    main()
