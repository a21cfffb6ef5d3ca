"""Wire 1 over TCP, as to engine cores on other nodes: encrypted, and for listed ones only."""

import asyncio
import contextlib
import dataclasses
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from api.config import ApiConfig
from api.engine_client import EngineClient
from api.request_stream import RequestStream
from api.service import Service
from cluster.addresses import wire_config
from engine.bound import BoundSocket, ServerWires
from engine.codec import unpack_tokens
from engine.curve import CurveKeys
from engine.errors import EngineDeadError
from engine.wire import EngineCoreOutput, FinishReason
from tests.helpers.api_peer import make_request
from tests.helpers.core_process import make_config, start_process
from tests.helpers.fake_engine import FakeEngine, endless_answer
from tests.helpers.outputs import read
from tests.helpers.tcp_proxy import TcpProxy
from tests.helpers.wires import has_ipv6, tcp_wires

TIMEOUT_S = 20.0
SECRET_PROMPT = np.arange(7000, 7400, dtype="<u4")


def run_once(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


@contextlib.asynccontextmanager
async def served(wires: ServerWires, *listed: bytes) -> AsyncIterator[EngineClient]:
    """A client on `wires` that admits the owners of those keys; not ready yet."""
    client = EngineClient()
    client.bind(wires)
    client.allow(listed)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def through_proxies(wires: ServerWires) -> Iterator[tuple[ServerWires, list[TcpProxy]]]:
    """The wires as an engine core sees them that is led through a man in the middle."""
    with TcpProxy(wires.request.address) as request, TcpProxy(wires.output.address) as output:
        led = ServerWires(
            request=BoundSocket(request.address),
            output=BoundSocket(output.address),
            keys=wires.keys,
        )
        yield led, [request, output]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.row("F-21")
def test_an_engine_core_serves_over_encrypted_tcp(host: str) -> None:
    """From READY to its last words, over IPv4 and IPv6."""
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 on this machine: wires over IPv6 stay unproved")
    wires, keys = tcp_wires(host), CurveKeys.generate()

    async def work() -> None:
        async with served(wires, keys.public) as client:
            await client.wait_ready(TIMEOUT_S)
            outputs = await read(client.stream(make_request("r", max_tokens=3)))
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert sum(len(unpack_tokens(o.new_token_ids)) for o in outputs) == 3
            assert len(await client.utility("statistics")) == 1
            with pytest.raises(EngineDeadError, match="step 3"):
                await read(client.stream(make_request("last", max_tokens=3)))

    config = dataclasses.replace(make_config([]), wire=wire_config([wires]))
    process = start_process(config, keys=keys, raise_at_step=3)
    try:
        run_once(work())
    finally:
        process.kill()
        process.join()


def test_nobody_can_read_a_prompt_on_its_way() -> None:
    """Token ids, names and answers are nowhere in the bytes; without encryption they would be."""
    request = msgspec.structs.replace(make_request("r"), prompt_token_ids=SECRET_PROMPT)
    plain = dataclasses.replace(tcp_wires(), keys=None)
    for wires, is_readable in ((tcp_wires(), False), (plain, True)):
        keys = CurveKeys.generate()

        async def work(wires: ServerWires = wires, keys: CurveKeys = keys) -> None:
            async with served(wires, keys.public) as client:
                await client.wait_ready(TIMEOUT_S)
                outputs = await read(client.stream(request))
                assert outputs[-1].finish_reason is not None

        with through_proxies(wires) as (led, proxies):
            with FakeEngine(led, keys=keys):
                run_once(work())
        request_wire, output_wire = (bytes(proxy.seen) for proxy in proxies)
        assert (SECRET_PROMPT.tobytes() in request_wire) is is_readable
        assert (b"tokenizer" in request_wire) is is_readable  # of READY's fingerprint
        assert (b"\xa1r" in output_wire) is is_readable  # the request's id


def test_an_engine_core_that_is_not_listed_is_not_heard() -> None:
    """The start fails at its deadline, and the refusals are a metric; listed in time, it serves."""

    async def start(*listed: bytes) -> int:
        wires = tcp_wires()
        with FakeEngine(wires, keys=keys):
            async with served(wires, *listed) as client:
                with contextlib.suppress(EngineDeadError):
                    await client.wait_ready(0.5)
                assert (client.engines[0].ready is not None) == (keys.public in listed)
                assert client.engines[0].heartbeat is None or keys.public in listed
                shown = await Service(ApiConfig(served_model_names=("m",)), client).render_metrics()
                [count] = re.findall(rb"^raywire:wire_refused_connections (\d+)", shown, re.M)
                return int(count)

    keys = CurveKeys.generate()
    assert run_once(start(CurveKeys.generate().public)) >= 2  # a DEALER and a PUSH, again and again
    assert run_once(start(keys.public)) == 0


def test_a_cut_link_pauses_streams_and_loses_nothing() -> None:
    """What was on its way arrives when the link is back, in order."""
    wires, keys = tcp_wires(), CurveKeys.generate()

    async def work() -> None:
        async with served(wires, keys.public) as client:
            await client.wait_ready(TIMEOUT_S)
            stream = client.stream(make_request("r", max_tokens=200))
            outputs = [await next_output(stream)]
            with proxies[0].cut(), proxies[1].cut():
                client.stream(make_request("sent meanwhile", max_tokens=1))
                num_steps = engine.num_steps
                await until(lambda: engine.num_steps >= num_steps + 20)
                assert [request.request_id for request in engine.received] == ["r"]
            outputs += await read(stream)
            tokens = [t for output in outputs for t in unpack_tokens(output.new_token_ids)]
            expected = itertools.islice(endless_answer(make_request("")), 200)
            assert tokens == list(expected)
            assert client.death is None

    with through_proxies(wires) as (led, proxies):
        with FakeEngine(led, endless_answer, keys=keys, step_s=0.005) as engine:
            run_once(work())
            assert [request.request_id for request in engine.received][1] == "sent meanwhile"


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds, while the loop runs."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def next_output(stream: RequestStream) -> EngineCoreOutput:
    while (output := stream.take()) is None:
        await stream.wakeup.wait()
    return output
