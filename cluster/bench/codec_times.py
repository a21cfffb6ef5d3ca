"""Wire 1's codec against bare msgspec: what tokens as arrays are worth. Used by `wire`.

`as lists` is the same struct with token ids as a list of integers, encoded and decoded by msgspec
alone; the other is ours, through `engine.codec`. Best of batches, taken in turn.
"""

import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import zmq

from cluster.addresses import ipc_folder
from cluster.bench.instant_workers import make_request
from engine.codec import Decoder, Encoder, pack_tokens
from engine.input_thread import _receive
from engine.sampling_params import SamplingParams
from engine.sockets import make_socket
from engine.wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Message,
    SchedulerStats,
)

_REQUESTS = (1000, 100_000)
_OUTPUTS = (32, 256)
_BUDGET_S = 0.2
_BATCH_S = 0.002
_NUM_RECEIVED = 200
_PATIENCE_MS = 10_000


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


def measure() -> dict[str, list[float]]:
    """Microseconds by figure; one sample of each but of receiving."""
    found: dict[str, list[float]] = {}
    for count in _REQUESTS:
        name = f"request of {count:,} tokens"
        found |= _encode_and_decode(name, *_requests(count))
        found[f"receive, {name}"] = _receive_us(count)
    for count in _OUTPUTS:
        found |= _encode_and_decode(f"outputs of {count} requests", *_outputs(count))
    return found


def request_us(num_tokens: int) -> float:
    """Microseconds to encode and to decode a request of so many tokens."""
    name = f"request of {num_tokens:,} tokens"
    found = _encode_and_decode(name, *_requests(num_tokens))
    return found[f"encode, {name}"][0] + found[f"decode, {name}"][0]


def _requests(num_tokens: int) -> tuple[Message, Message]:
    """The same as lists and as ours."""
    ours = _request(num_tokens)
    assert ours.prompt_token_ids is not None
    assert ours.sampling_params is not None
    as_list = ListRequest(
        ours.request_id,
        ours.prompt_token_ids.tolist(),
        None,
        ours.sampling_params,
        None,
        1.0,
        None,
        None,
        None,
    )
    return as_list, ours


def _request(num_tokens: int) -> EngineCoreRequest:
    prompt = np.arange(1, num_tokens + 1, dtype=np.uint32) % 900
    return make_request("cmpl-0123456789abcdef", prompt, max_tokens=4)


def _outputs(num_requests: int) -> tuple[Message, Message]:
    ids = [f"cmpl-{i:016x}" for i in range(num_requests)]
    stats = SchedulerStats(1, num_requests, 0.5)
    return (
        ListOutputs(0, 0, [ListOutput(i, [1000]) for i in ids], stats, 1.0),
        EngineCoreOutputs(
            0, 0, [EngineCoreOutput(i, pack_tokens([1000])) for i in ids], stats, 1.0
        ),
    )


def _encode_and_decode(name: str, as_list: Message, ours: Message) -> dict[str, list[float]]:
    plain_encoder = msgspec.msgpack.Encoder()
    plain_decoder = msgspec.msgpack.Decoder(type(as_list))
    plain = plain_encoder.encode(as_list)
    encoder, decoder, buffer = Encoder(), Decoder[Message](type(ours)), bytearray()
    frames = [bytes(frame) for frame in encoder.encode(ours)]
    runs: dict[str, Callable[[], object]] = {
        f"encode, {name}": lambda: encoder.encode_into(ours, buffer),
        f"encode, {name}, as lists": lambda: plain_encoder.encode_into(as_list, buffer),
        f"decode, {name}": lambda: decoder.decode(frames),
        f"decode, {name}, as lists": lambda: plain_decoder.decode(plain),
    }
    best = _best_us(*runs.values())
    return {each: [best_us] for each, best_us in zip(runs, best, strict=True)}


def _best_us(*runs: Callable[[], object]) -> list[float]:
    """Microseconds per call of each: the best of batches, taken in turn so that a busy machine
    slows all of them alike."""
    counts = [max(1, int(_BATCH_S / max(_time_s(run, 1), 1e-6))) for run in runs]
    best = [float("inf")] * len(runs)
    end = time.perf_counter() + _BUDGET_S
    while time.perf_counter() < end:
        for i, (run, count) in enumerate(zip(runs, counts, strict=True)):
            best[i] = min(best[i], _time_s(run, count) / count * 1e6)
    return best


def _time_s(run: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - began


def _receive_us(num_tokens: int) -> list[float]:
    """To receive one request that waits in the socket, as the input thread does it."""
    frames = [b"\0", *Encoder().encode(_request(num_tokens))]
    with zmq.Context() as context, ipc_folder(None) as folder:
        with make_socket(context, zmq.ROUTER) as router, make_socket(context, zmq.DEALER) as dealer:
            address = folder.socket("router").address
            router.bind(address)
            dealer.connect(address)
            dealer.send(b"hello")
            peer, _ = router.recv_multipart()
            return list(_receives(router, dealer, [peer, *frames]))


def _receives(
    router: "zmq.Socket[bytes]", dealer: "zmq.Socket[bytes]", message: list[bytes | memoryview]
) -> Iterator[float]:
    for _ in range(_NUM_RECEIVED):
        router.send_multipart(message)
        assert dealer.poll(_PATIENCE_MS)
        began = time.perf_counter()
        _receive(dealer)
        yield (time.perf_counter() - began) * 1e6
