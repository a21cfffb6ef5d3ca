"""Wire 1 against bare msgspec: what tokens as arrays are worth, and what the codec adds.

    python -m tests.bench.bench_codec [--json FILE]

Each row is the best of several runs of one process, in microseconds, with the ratio to the row it
is compared with. `list` is the same struct with token ids as a list of integers, encoded and
decoded by msgspec alone; `array` is ours, through `engine.codec`.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec
import numpy as np
import zmq

from engine.codec import Decoder, Encoder, pack_tokens
from engine.input_thread import _receive
from engine.sampling_params import SamplingParams
from engine.sockets import make_socket
from engine.wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Message,
    SchedulerStats,
)
from tests.helpers.api_peer import make_request, socket_folder


class ListRequest(Message, frozen=True):
    """EngineCoreRequest as it would be with token ids as integers."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: None
    sampling_params: SamplingParams
    pooling_params: None
    arrival_time: float
    lora_request: None
    cache_salt: None
    data_parallel_rank: None


class ListOutput(Message, frozen=True):
    """EngineCoreOutput as it would be."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    details: None = None


class ListOutputs(Message, frozen=True):
    engine_index: int
    epoch: int
    outputs: list[ListOutput]
    stats: SchedulerStats
    timestamp: float


@dataclass
class Row:
    what: str
    size_bytes: int
    list_encode_us: float
    array_encode_us: float
    list_decode_us: float
    array_decode_us: float


def best_us(*runs: Callable[[], object], budget_s: float = 0.8) -> list[float]:
    """Microseconds per call of each: the best of batches, taken in turn so that a busy machine
    slows all of them alike."""
    counts = [max(1, int(0.002 / max(_time(run, 1), 1e-6))) for run in runs]
    best = [float("inf")] * len(runs)
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end:
        for i, (run, count) in enumerate(zip(runs, counts, strict=True)):
            best[i] = min(best[i], _time(run, count) / count * 1e6)
    return best


def _time(run: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - began


def bench_request(num_tokens: int) -> Row:
    request = make_request("cmpl-0123456789abcdef", num_tokens)
    assert request.prompt_token_ids is not None
    assert request.sampling_params is not None
    as_list = ListRequest(
        request.request_id,
        request.prompt_token_ids.tolist(),
        None,
        request.sampling_params,
        None,
        1.0,
        None,
        None,
        None,
    )
    return _row(f"request of {num_tokens:,} tokens", as_list, request)


def bench_outputs(num_requests: int) -> Row:
    ids = [f"cmpl-{i:016x}" for i in range(num_requests)]
    stats = SchedulerStats(1, num_requests, 0.5)
    return _row(
        f"outputs of {num_requests} requests",
        ListOutputs(0, 0, [ListOutput(i, [1000]) for i in ids], stats, 1.0),
        EngineCoreOutputs(
            0, 0, [EngineCoreOutput(i, pack_tokens([1000])) for i in ids], stats, 1.0
        ),
    )


def _row(what: str, as_list: Message, ours: Message) -> Row:
    plain_encoder = msgspec.msgpack.Encoder()
    plain_decoder = msgspec.msgpack.Decoder(type(as_list))
    plain = plain_encoder.encode(as_list)
    encoder, decoder, buffer = Encoder(), Decoder[Message](type(ours)), bytearray()
    frames = [bytes(frame) for frame in encoder.encode(ours)]
    list_encode, array_encode = best_us(
        lambda: plain_encoder.encode_into(as_list, buffer),
        lambda: encoder.encode_into(ours, buffer),
    )
    list_decode, array_decode = best_us(
        lambda: plain_decoder.decode(plain), lambda: decoder.decode(frames)
    )
    size_bytes = sum(map(len, frames))
    return Row(what, size_bytes, list_encode, array_encode, list_decode, array_decode)


def bench_receive(num_tokens: int) -> dict[str, float]:
    """Microseconds to receive one request that waits in the socket: all frames copied, none
    copied, and as the input thread does it."""
    readers: dict[str, Callable[[zmq.Socket[bytes]], object]] = {
        "copied": lambda socket: socket.recv_multipart(),
        "not copied": lambda socket: [f.buffer for f in socket.recv_multipart(copy=False)],
        "ours": _receive,
    }
    frames = [b"\0", *Encoder().encode(make_request("r", num_tokens))]
    with zmq.Context() as context, socket_folder() as folder:
        with make_socket(context, zmq.ROUTER) as router, make_socket(context, zmq.DEALER) as dealer:
            address = f"ipc://{folder}/router"
            router.bind(address)
            dealer.connect(address)
            dealer.send(b"hello")
            peer, _ = router.recv_multipart()

            def best(read: Callable[[zmq.Socket[bytes]], object]) -> float:
                times = []
                for _ in range(200):
                    router.send_multipart([peer, *frames])
                    assert dealer.poll(10_000)
                    began = time.perf_counter()
                    read(dealer)
                    times.append(time.perf_counter() - began)
                return float(np.median(times)) * 1e6

            return {name: best(read) for name, read in readers.items()}


def report(rows: list[Row], receives: dict[int, dict[str, float]]) -> str:
    lines = [
        f"{'message':<26}{'bytes':>9}   encode us: {'list':>8}{'array':>8}{'ratio':>8}"
        f"   decode us: {'list':>8}{'array':>8}{'ratio':>8}"
    ]
    for r in rows:
        lines.append(
            f"{r.what:<26}{r.size_bytes:>9}{'':14}{r.list_encode_us:>8.1f}{r.array_encode_us:>8.1f}"
            f"{r.list_encode_us / r.array_encode_us:>7.1f}x{'':14}{r.list_decode_us:>8.1f}"
            f"{r.array_decode_us:>8.1f}{r.list_decode_us / r.array_decode_us:>7.1f}x"
        )
    lines += ["", f"{'receive, median us':<26}{'copied':>10}{'not copied':>12}{'ours':>10}"]
    for num_tokens, times in receives.items():
        values = f"{times['copied']:>10.1f}{times['not copied']:>12.1f}{times['ours']:>10.1f}"
        lines.append(f"request of {num_tokens:>7,} tokens {values}")
    return "\n".join(lines)


@click.command()
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here."
)
def main(json_path: Path | None) -> None:
    """Encode, decode and receive the messages of wire 1."""
    rows = [bench_request(n) for n in (100, 1000, 10_000, 100_000)]
    rows += [bench_outputs(n) for n in (1, 32, 256)]
    receives = {n: bench_receive(n) for n in (100, 2000, 10_000, 100_000)}
    click.echo(report(rows, receives))
    if json_path is not None:
        figures = {"messages": [asdict(row) for row in rows], "receive_us": receives}
        json_path.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
