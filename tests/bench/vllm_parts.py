"""vLLM's own parts, on command, measured as ours are. For `obey`: standard library and vLLM only.

`ring` is its MessageQueue with chunks of 16 MiB; `codec` its encoder and decoder of one request;
`schedule` its Scheduler, driven without a model; `hash` its block hashes. All with its defaults.

    python -P vllm_parts.py RANK HANDLE      a reader of the ring; started by `ring`
"""

import pickle
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_CHUNK_BYTES = 16 << 20
_PATIENCE_S = 120
_PROMPT_TOKENS = 128
_MARK = "handle "
_NUM_TRIES = 7


def open_commands(model: str) -> dict[str, Any]:
    """`model` is a folder whose limits the scheduler takes; its weights are not read."""
    parts = _Parts(model)
    return {
        "ring": parts.ring,
        "codec": parts.codec,
        "schedule": parts.schedule,
        "hash": parts.hash,
    }


class _Parts:
    def __init__(self, model: str) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self._config = EngineArgs(
            model=model,
            max_model_len=2048,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            enable_prefix_caching=True,
            block_size=16,
        ).create_engine_config()
        self._config.cache_config.num_gpu_blocks = 20_000
        function = get_hash_fn_by_name(self._config.cache_config.prefix_caching_hash_algo)
        init_none_hash(function)
        self._hasher = get_request_block_hasher(16, function)
        self._rings: dict[int, _Ring] = {}

    def ring(self, num_readers: int, num_bytes: int, rounds: int) -> float:
        """Median microseconds of a round trip."""
        if num_readers not in self._rings:
            self._rings[num_readers] = _Ring(num_readers)
        return self._rings[num_readers].round_trip_us(bytes(num_bytes), rounds)

    def codec(self, num_tokens: int) -> float:
        """Microseconds to encode and to decode a request."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
        params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=4)
        ids = _random_ids(1, num_tokens)[0]
        request = EngineCoreRequest("c" * 32, ids, None, params, None, 1.0, None, None, None)
        frames = encoder.encode(request)
        count = max(10, 1_000_000 // num_tokens)
        return sum(
            _least_us(run, count)
            for run in (lambda: encoder.encode(request), lambda: decoder.decode(frames))
        )

    def schedule(self, running: int, rounds: int) -> float:
        """Median microseconds of schedule, update and encode in steady decode."""
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.serial_utils import MsgpackEncoder

        scheduler, encoder = self._scheduler(), MsgpackEncoder()
        took: list[float] = []
        requests = [
            self._request(f"cmpl-{number:032d}", ids, rounds + 10)
            for number, ids in enumerate(_random_ids(running, _PROMPT_TOKENS))
        ]
        by_id = {request.request_id: request for request in requests}
        for request in requests:
            scheduler.add_request(request)
        while len(took) < rounds:
            began = time.thread_time_ns()
            plan = scheduler.schedule()
            schedule_ns = time.thread_time_ns() - began
            names = list(plan.num_scheduled_tokens)
            sampled = [
                [7] if by_id[name].num_computed_tokens >= _PROMPT_TOKENS else [] for name in names
            ]
            reply = ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            )
            began = time.thread_time_ns()
            for outputs in scheduler.update_from_output(plan, reply).values():
                encoder.encode(outputs)
            if len(names) == running == sum(plan.num_scheduled_tokens.values()):
                took.append((schedule_ns + time.thread_time_ns() - began) / 1e3)
        return statistics.median(took)

    def hash(self, num_tokens: int) -> float:
        """Microseconds to hash the blocks of a prompt, per 1,000 tokens."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        ids, params = _random_ids(1, num_tokens)[0], SamplingParams(max_tokens=1)
        # A request hashes when it is made; what else that takes is taken off.
        plain_us = _least_us(lambda: Request("r", ids, params, None), 1)
        hashed_us = _least_us(lambda: Request("r", ids, params, None, block_hasher=self._hasher), 1)
        return (hashed_us - plain_us) / num_tokens * 1000

    def _request(self, name: str, ids: list[int], num_tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        params.update_from_generation_config({}, 1)
        return Request(name, ids, params, None, arrival_time=1.0, block_hasher=self._hasher)

    def _scheduler(self) -> Any:
        import torch
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(["l0", "l1"], spec)]
        return Scheduler(
            vllm_config=self._config,
            kv_cache_config=KVCacheConfig(20_000, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(self._config),
            block_size=16,
            log_stats=True,
        )


class _Ring:
    """A MessageQueue to readers in processes of their own, the first of which answers."""

    def __init__(self, num_readers: int) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self._calls = MessageQueue(
            num_readers, num_readers, max_chunk_bytes=_CHUNK_BYTES, max_chunks=10
        )
        handle = pickle.dumps(self._calls.export_handle()).hex()
        self._readers = [
            subprocess.Popen(
                [sys.executable, "-P", __file__, str(rank), handle],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_readers)
        ]
        found = [_read_handle(reader) for reader in self._readers]
        self._calls.wait_until_ready()
        self._answers = MessageQueue.create_from_handle(found[0], 0)
        self._answers.wait_until_ready()

    def round_trip_us(self, payload: bytes, rounds: int) -> float:
        took = []
        for _ in range(rounds):
            began = time.perf_counter()
            self._calls.enqueue(payload)
            self._answers.dequeue(timeout=_PATIENCE_S)
            took.append((time.perf_counter() - began) * 1e6)
        return statistics.median(took)


def _read_handle(reader: "subprocess.Popen[str]") -> Any:
    assert reader.stdout is not None
    for line in reader.stdout:
        if line.startswith(_MARK):
            return pickle.loads(bytes.fromhex(line.removeprefix(_MARK)))
    raise SystemExit("a reader of the ring has ended")


def _read_all(rank: int, handle: Any) -> None:
    """A reader, until it is killed."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    calls = MessageQueue.create_from_handle(handle, rank)
    answers = None
    exported = None
    if rank == 0:
        answers = MessageQueue(1, 1, max_chunk_bytes=_CHUNK_BYTES, max_chunks=4)
        exported = answers.export_handle()
    print(f"{_MARK}{pickle.dumps(exported).hex()}", flush=True)  # noqa: T201
    calls.wait_until_ready()
    if answers is not None:
        answers.wait_until_ready()
    while True:
        calls.dequeue(indefinite=True)
        if answers is not None:
            answers.enqueue(b"ok")


def _least_us(run: Callable[[], object], count: int) -> float:
    """Of one call, the least of several batches of `count`."""

    def took_s() -> float:
        began = time.perf_counter()
        for _ in range(count):
            run()
        return time.perf_counter() - began

    return min(took_s() for _ in range(_NUM_TRIES)) / count * 1e6


def _random_ids(count: int, length: int) -> list[list[int]]:
    noise = random.Random(count)
    return [noise.choices(range(10, 2000), k=length) for _ in range(count)]


if __name__ == "__main__":
    _read_all(int(sys.argv[1]), pickle.loads(bytes.fromhex(sys.argv[2])))
