"""Frozen settings of an engine core, handed down in slices: the scheduler gets `SchedulerConfig`,
never more.

Built once in `cluster/cli.py` (or by the `LLM` class). A value worked out later, such as the number
of KV blocks, is a result: it is returned, not written back.
"""

from dataclasses import dataclass, field
from typing import Literal

from engine.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Policy = Literal["fcfs", "priority"]
LinearBackendName = Literal["auto", "native", "torch"]
Quantization = Literal["int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    path: str
    """Local folder with config.json, tokenizer.json and safetensors. Hub ids and GGUF files are
    resolved before."""

    model_type: str
    """`model_type` of config.json; "scripted" is the scripted model."""

    dtype: DType = "auto"
    """Arithmetic and weights; "auto" is what config.json says."""

    quantization: Quantization | None = None
    """Of weights that are bfloat16, while they are loaded; on CPU."""

    max_model_len: int | Literal["auto"] | None = None
    """Longest prompt plus output, in tokens. "auto": as much of the model's own as the KV cache
    holds. None: the model's own, which must fit if `kv_cache_memory_bytes` is given; a cache of the
    default size shortens it, with a warning."""

    seed: int = 0
    """Start of the noise of requests without a seed of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    block_size: int | None = None
    """Tokens per KV block. None: what the workers' attention reads best (`WorkerReport`)."""

    enable_prefix_caching: bool = True

    kv_cache_memory_bytes: int | None = None
    """Bytes of KV cache per worker. None: 90% of a GPU's free memory; on CPU 1 GiB, but all workers
    together no more than a quarter of free memory; shared among the engines of this node."""

    num_gpu_blocks_override: int | None = None
    """Exactly this many blocks, whatever the memory. For tests of preemption."""

    def __post_init__(self) -> None:
        if self.block_size not in (None, 1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise ConfigError(
                f"--block-size must be a power of two from 1 to 256, not {self.block_size}"
            )
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes <= 0:
            raise ConfigError(
                f"--kv-cache-memory-bytes must be positive, not {self.kv_cache_memory_bytes}"
            )
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise ConfigError("--num-gpu-blocks-override must be at least 2")


MAX_NUM_SEQS = 1 << 14
MAX_NUM_BATCHED_TOKENS = 1 << 20
"""Workers keep buffers for as many: gigabytes at these bounds, and no use beyond them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 256
    """Requests that may run together in one step."""

    max_num_batched_tokens: int = 2048
    """Tokens of all those requests together, prefill and decode."""

    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in one step; 0 leaves only the budget as the limit."""

    enable_chunked_prefill: bool = True
    """Off: a prompt runs whole in one step, so `max_num_batched_tokens` must hold the longest."""

    policy: Policy = "fcfs"

    async_scheduling: bool | None = None
    """Plan the next step while one runs, where one worker does all. None: where its computing
    leaves a core free (`WorkerReport`), or planning would hold it up."""

    def __post_init__(self) -> None:
        for name, most in (
            ("max_num_seqs", MAX_NUM_SEQS),
            ("max_num_batched_tokens", MAX_NUM_BATCHED_TOKENS),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be from 1 to {most}, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs"
                f" ({self.max_num_seqs}): a full decode batch would not fit in one step; raise"
                " the first or lower the second"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_start_rank: int = 0
    """The first rank of this server; others may have lower ones (hybrid and external balancing)."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def engine_index(self) -> int:
        """This rank's place among those of its server: its number on wire 1."""
        return self.data_parallel_rank - self.data_parallel_start_rank

    @property
    def world_size(self) -> int:
        """Workers of one engine core. Rank = pp_rank * tensor_parallel_size + tp_rank."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def output_rank(self) -> int:
        """The worker that replies to a step: the first tensor rank of the last pipeline stage."""
        return self.world_size - self.tensor_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    ring_chunk_bytes: int = 16 << 20
    """Chunk of the shared-memory rings (`RAYWIRE_MQ_MAX_CHUNK_BYTES_MB`); larger messages take the
    side channel."""

    execute_timeout_s: float = 300.0
    """A step without a reply for this long has failed (`RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS`)."""

    start_timeout_s: float = 600.0
    """All workers must have loaded by then."""

    ring_warning_interval_s: float = 60.0
    """A full ring is reported this often."""

    num_threads: int | None = None
    """Compute threads per CPU worker; None shares the cores among the workers of the node."""

    num_local_engines: int = 1
    """Engine cores on this node: memory and cores are shared among them."""

    first_device: int = 0
    """Of the CUDA devices that this process sees, the first of this engine core's."""

    device: Literal["auto", "cpu", "cuda"] = "auto"

    attention_backend: str | None = None
    """"reference", "cpu" or "varlen"; None picks the fastest that works on the device."""

    enforce_eager: bool = False
    """Launch each kernel of a decode by itself, where CUDA graphs would launch them at once."""

    linear_backend: LinearBackendName = "auto"
    """Whether our kernels compute, attention and sampling included: where they can, or else (as
    "native" has it) nothing starts, or not at all."""

    kernel_cache_dir: str | None = None
    """Where compiled kernels are kept, and built at first use; None leaves their work to torch."""

    start_method: Literal["spawn", "fork"] = "spawn"
    """How worker processes start (`RAYWIRE_WORKER_MULTIPROC_METHOD`). Fork is quick but unsafe in a
    process that has used CUDA, ZeroMQ or threads, as an engine core has."""

    rpc_base_path: str | None = None
    """Where the workers' socket folder is made (`RAYWIRE_RPC_BASE_PATH`); None is the system's
    temporary folder. It is gone again once all workers are connected."""

    def __post_init__(self) -> None:
        if not 4096 <= self.ring_chunk_bytes <= 1 << 30:
            raise ConfigError(
                f"a ring's chunk (RAYWIRE_MQ_MAX_CHUNK_BYTES_MB) has 4 KiB to 1 GiB, not"
                f" {self.ring_chunk_bytes} bytes"
            )
        for name in ("execute_timeout_s", "start_timeout_s", "ring_warning_interval_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAddresses:
    """Where the DP coordinator has bound."""

    request: str
    """ROUTER: START_DP_WAVE to engine cores, READY from them."""

    output: str
    """PULL: engine cores' statistics and wave messages, API servers' first requests."""

    publish: str
    """XPUB: loads and waves, to API servers."""

    public_key: bytes | None = None
    """Whom to expect there (`engine.curve`); None on ipc."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveConfig:
    """Whom an engine core expects at the other end of its TCP connections. Its own key pair is no
    setting: it makes that itself."""

    server_public_keys: tuple[bytes, ...]
    """One per API server, and the coordinator's last (`engine.curve`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    request_addresses: tuple[str, ...]
    """One ROUTER per API server, and the coordinator's last; the engine core connects a DEALER to
    each."""

    output_addresses: tuple[str, ...]
    """One PULL per API server, and the coordinator's last, in the same order."""

    coordinator_index: int | None = None
    """The coordinator's place in them: to an engine core it is one more API server, which sends no
    requests. None without one."""

    epoch: int = 0
    """Incarnation of this rank: a restarted rank comes under a new one."""

    heartbeat_interval_s: float = 1.0

    curve: CurveConfig | None = None
    """Given where the addresses are TCP: those wires are encrypted. None on ipc, which is private
    without."""

    tells_first_cause: bool = True
    """Whether the end of this engine core is a fault of its own, whose first cause it logs itself.
    Of several that end together one was the first, and only who hears of all can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: ModelConfig
    wire: WireConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    log_level: str = "INFO"
    run_folder: str | None = None
    """Where this process and its workers keep what explains their end; None: nowhere."""
