"""Time to the first token of one request at a time, through more and more of the system.

    python -m tests.bench.first_token --model FOLDER --port PORT --out FILE

- `core`: EngineCore in this process, with a worker behind the ring: no sockets, no text.
- `llm`: the `LLM` class: tokenizer, load balancer, wire 1 and an engine process more.
- `http`: a streaming completion of a running server, over a connection that stays open.

One prompt after the other goes through all three, so that what else happens on the machine happens
to all. Each is new: no cached prefix helps. Writes a JSON object of lists of milliseconds.
"""

import json
import random
import socket
import string
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np

from api import LLM, SamplingParams
from cluster.config import EngineOptions
from cluster.environment import Environment
from cluster.launch import resolve_model
from engine.config import WireConfig
from engine.core import EngineCore
from engine.sampling_params import SamplingParams as CoreSamplingParams
from engine.wire import EngineCoreRequest
from workers.executor import start_executor

PROMPT_CHARS = 128
NUM_WARM_UP = 20
TIMEOUT_S = 60.0

Ask = Callable[[str], float]
"""Sends a prompt and waits for its end; returns when its first token was there, on
`time.perf_counter`."""


def measure(ways: dict[str, Ask], num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each prompt, by way."""
    noise = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(NUM_WARM_UP + num_rounds):
        for name, ask in ways.items():
            prompt = "".join(noise.choices(string.ascii_letters, k=PROMPT_CHARS))
            began = time.perf_counter()
            took_s = ask(prompt) - began
            if number >= NUM_WARM_UP:
                times[name].append(took_s * 1e3)
    return times


@contextmanager
def engine_core(model: str) -> Iterator[Ask]:
    """Schedule, execute, update, called by hand."""
    options = EngineOptions(model=model)
    environment = Environment()
    (config,) = options.engine_configs(
        resolve_model(options, environment),
        WireConfig(request_addresses=(), output_addresses=()),
        environment,
        "WARNING",
    )
    executor = start_executor(config, lambda cause: None)  # a step that fails raises it
    try:
        core = EngineCore(config, executor)

        def ask(prompt: str) -> float:
            core.add(core.prepare(_core_request(prompt)))
            while not any(outputs.outputs for outputs in core.step(lambda: None).values()):
                pass
            return time.perf_counter()

        yield ask
    finally:
        executor.close()


def _core_request(prompt: str) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=prompt,
        prompt_token_ids=np.frombuffer(prompt.encode(), np.uint8).astype("<u4"),
        mm_features=None,
        sampling_params=CoreSamplingParams(max_tokens=1, temperature=0.0),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@contextmanager
def llm_class(model: str) -> Iterator[Ask]:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with LLM(model) as llm:

        def ask(prompt: str) -> float:
            llm.generate(prompt, params, use_tqdm=False)
            return time.perf_counter()

        yield ask


@contextmanager
def http_stream(port: int) -> Iterator[Ask]:
    """A client of few instructions: what it takes is not the server's time."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask(prompt: str) -> float:
            connection.sendall(_http_request(prompt))
            received = _receive(connection)
            if not received.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"no stream, but {received!r}")
            while b"data: {" not in received:
                received += _receive(connection)
            first_at = time.perf_counter()
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += _receive(connection)
            return first_at

        yield ask


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise RuntimeError("the server has closed the connection")
    return data


def _http_request(prompt: str) -> bytes:
    body = {"model": "bench", "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@click.command(help=__doc__)
@click.option("--model", required=True)
@click.option("--port", required=True, type=int, help="Of a server of that model, as `bench`.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--rounds", default=300, show_default=True)
def main(model: str, port: int, out: Path, rounds: int) -> None:
    with engine_core(model) as core, llm_class(model) as llm, http_stream(port) as http:
        times = measure({"core": core, "llm": llm, "http": http}, rounds)
    out.write_text(json.dumps(times), encoding="utf-8")


if __name__ == "__main__":
    main()
