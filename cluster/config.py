"""Settings of a whole server, built once: by `cluster/cli.py` from flags, by the `LLM` class from
keyword arguments. `cluster/launch.py` hands each package its own slice.

Names and meanings are vLLM's wherever it has them. Checking happens here, before anything starts.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from api.limits import (
    DEFAULT_MAX_N,
    DEFAULT_MAX_STORED_RESPONSES,
    DEFAULT_NUM_WAITING,
    MAX_SEQUENCES,
    MAX_STORED_RESPONSES,
    SEND_TIMEOUT_S,
)
from api.sampling_defaults import check_override
from cluster.environment import Environment, log_level
from cluster.placement import Strategy, check_strategy
from cluster.plan import Topology
from engine import run_log
from engine.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ExecutorConfig,
    LinearBackendName,
    ModelConfig,
    ParallelConfig,
    Policy,
    Quantization,
    SchedulerConfig,
    WireConfig,
)
from engine.errors import ConfigError
from workers.supported import SCRIPTED

Device = Literal["auto", "cpu", "cuda"]
Backend = Literal["mp", "ray"]
OnDeath = Literal["exit", "replace"]


_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+")
_ROOT_PATH = re.compile(r"/\S*[^/\s]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that is ready to load."""

    name: str
    """As the user gave it: the default name in the API."""

    path: Path
    """Local folder with config.json, tokenizer.json and safetensors."""

    model_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user may choose about the engines: `serve`'s flags, and the arguments of `LLM`."""

    model: str
    """A hub id, a folder, a .gguf file, `demo` or `scripted`."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    dtype: DType = "auto"
    quantization: Quantization | None = None
    max_model_len: int | Literal["auto"] | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None
    scheduling_policy: Policy = "fcfs"
    block_size: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    seed: int = 0
    device: Device = "auto"
    enforce_eager: bool = False
    attention_backend: str | None = None
    linear_backend: LinearBackendName = "auto"
    startup_timeout: float = 600.0
    """Seconds."""
    log_level: str | None = None
    """None: `RAYWIRE_LOG_LEVEL`; unset too, INFO for the command and WARNING for `LLM`."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("no model given; try `demo`, a folder or a hub id")
        if isinstance(self.max_model_len, int) and self.max_model_len < 1:
            raise ConfigError(
                f"--max-model-len must be at least 1, auto or -1, not {self.max_model_len}"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError("--long-prefill-token-threshold must not be negative")
        if not 0 < self.startup_timeout < math.inf:
            raise ConfigError(
                f"--startup-timeout must be positive seconds, not {self.startup_timeout}"
            )
        if self.log_level is not None:
            try:
                object.__setattr__(self, "log_level", log_level(self.log_level))
            except ValueError as error:
                raise ConfigError(f"--log-level {error}, not {self.log_level!r}") from error
        if self.quantization is not None:
            self._check_quantization(self.quantization)
        # Each slice checks itself: a mistake shows before a port is bound or a model loaded.
        self.cache_config()
        self.scheduler_config()
        self.parallel_config(0)

    def _check_quantization(self, wanted: Quantization) -> None:
        """What is known before a model is: a worker knows the rest."""
        conflicts = (("device", "cuda"), ("dtype", "float32"), ("dtype", "float16"))
        for name, value in (*conflicts, ("linear_backend", "torch")):
            if getattr(self, name) == value:
                raise ConfigError(
                    f"--quantization {wanted} is for bfloat16 on CPU, by raywire's own kernels; not"
                    f" with --{name.replace('_', '-')} {value}"
                )
        if self.model.partition(":")[0] == SCRIPTED:
            raise ConfigError(f"--quantization {wanted}: the scripted model has no weights")

    def cache_config(self) -> CacheConfig:
        return CacheConfig(
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
        )

    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.scheduling_policy,
            async_scheduling=self.async_scheduling,
        )

    @property
    def world_size(self) -> int:
        """Workers, and so devices, of one engine core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def parallel_config(self, data_parallel_rank: int, start_rank: int = 0) -> ParallelConfig:
        return ParallelConfig(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            data_parallel_size=self.data_parallel_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_start_rank=start_rank,
        )

    def executor_config(
        self, environment: Environment, num_local_engines: int, first_device: int
    ) -> ExecutorConfig:
        return ExecutorConfig(
            ring_chunk_bytes=environment.mq_max_chunk_bytes,
            execute_timeout_s=environment.execute_model_timeout_s,
            start_timeout_s=self.startup_timeout,
            num_local_engines=num_local_engines,
            first_device=first_device,
            device=self.device,
            enforce_eager=self.enforce_eager,
            attention_backend=self.attention_backend,
            linear_backend=self.linear_backend,
            start_method=environment.worker_multiproc_method or "spawn",
            rpc_base_path=environment.rpc_base_path,
            kernel_cache_dir=str(environment.cache_dir),
        )

    def engine_configs(
        self,
        model: ResolvedModel,
        wire: WireConfig,
        environment: Environment,
        log_level: str,
        ranks: range | None = None,
    ) -> list[EngineConfig]:
        """The settings of the engine cores of this node.

        Args:
            model: what they load.
            wire: where they connect.
            environment: our variables.
            log_level: of their logs.
            ranks: which ones; None: all.
        """
        ranks = ranks or range(self.data_parallel_size)
        model_config = ModelConfig(
            path=str(model.path),
            model_type=model.model_type,
            dtype=self.dtype,
            quantization=self.quantization,
            max_model_len=self.max_model_len,
            seed=self.seed,
        )
        return [
            EngineConfig(
                model=model_config,
                wire=wire,
                cache=self.cache_config(),
                scheduler=self.scheduler_config(),
                parallel=self.parallel_config(rank, ranks.start),
                executor=self.executor_config(
                    environment, len(ranks), first_device=index * self.world_size
                ),
                log_level=log_level,
                run_folder=run_log.folder(),
            )
            for index, rank in enumerate(ranks)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything `raywire serve` was asked for."""

    engine: EngineOptions
    environment: Environment = field(default_factory=Environment)
    host: str = "0.0.0.0"
    port: int = 8000
    """0: a port of the kernel's choice, which the log tells."""

    api_server_count: int | None = None
    served_model_name: tuple[str, ...] = ()
    """Names in the API; the first is the one that answers carry. Empty: the model as given."""

    chat_template: str | None = None
    """Jinja text in place of the model's own template."""

    generation_config: str = "auto"
    """Where defaults of sampling are read: "auto" is the model's folder, "vllm" nowhere."""

    override_generation_config: Mapping[str, Any] | None = None
    """Defaults of sampling that come before those."""

    trust_request_chat_template: bool = False
    """Requests may bring templates of their own."""

    return_tokens_as_token_ids: bool = False
    """Log probabilities write tokens as ids, unless a request says otherwise."""

    tool_call_parser: str = "auto"
    """How the model writes calls of tools; auto: as its chat template shows."""

    enable_auto_tool_choice: bool = True
    """False: requests with tools are refused."""

    reasoning_parser: str | None = None
    """How the model marks its thoughts; None: they are part of the answer."""

    max_n: int = DEFAULT_MAX_N
    """Largest `n` and `best_of` of one request."""

    max_stored_responses: int = DEFAULT_MAX_STORED_RESPONSES
    """Responses of /v1/responses that each API server keeps, to be read again or continued;
    0: none."""

    send_timeout: float = SEND_TIMEOUT_S
    """Seconds in which a client must have read what lies before it."""

    max_num_queued_reqs: int | None = None
    """Sequences in flight at most, waiting or running, on all ranks of this server; None: 1024 more
    than the ranks take at once."""

    max_num_queued_tokens: int | None = None
    """Prompt tokens that may wait for their prefill; None: no limit."""

    allowed_origins: tuple[str, ...] = ()
    """Web sites whose scripts may speak to this server from a browser; "*": all. Empty: none."""

    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    """What those scripts may use and send."""

    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Clients have to have one of these keys, where there are any."""

    api_key_file: Path | None = None
    """More of them, one a line; read again when it changes."""

    metrics_key_file: Path | None = None
    """Keys that open /metrics and nothing else. Where there are keys of the API, those do too."""

    open_metrics: bool = False
    """Nobody needs a key for /metrics."""

    admin_key_file: Path | None = None
    """Keys of administrators, whose routes are not there without one."""

    prefix_cache_salt_per_key: bool = False
    """Requests share cached prefixes only with those of the same key."""

    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None
    ssl_cert_reqs: int = 0
    """TLS on the HTTP port, as uvicorn and vLLM name it; see `api.tls.TlsConfig`."""

    root_path: str = ""
    """Where a proxy has put this server: `/llm`."""

    disable_fastapi_docs: bool = False
    """No `/openapi.json` and `/docs`. vLLM's name for it: they are not FastAPI's."""

    shutdown_timeout: float = 20.0
    """Seconds; below the 30 that Kubernetes grants by default."""

    data_parallel_backend: Backend | None = None
    """Child processes of the command, or actors of a Ray cluster. None: see `backend`."""

    ray_address: str | None = None
    """None: that of the job or the node; without a cluster there, Ray is started for us."""

    data_parallel_placement: Strategy | None = None
    """How ranks go to nodes (`placement`). None: strict with `data_parallel_size_local`, else
    pack."""

    data_parallel_size_local: int | None = None
    """Ranks on each node that is used."""

    data_parallel_rank: int | None = None
    """External balancing: this server is this one rank, and has an endpoint of its own."""

    data_parallel_hybrid_lb: bool = False
    """Hybrid balancing: a server for the ranks of each node, with an endpoint of its own."""

    data_parallel_start_rank: int | None = None
    """The first rank of a hybrid server; there are `data_parallel_size_local`."""

    placement_timeout: float = 300.0
    """Seconds that a cluster which is busy has to make room."""

    wire_port_range: tuple[int, int] | None = None
    """First and last port that wires over TCP may bind, for sites with firewalls; None: any."""

    on_engine_death: OnDeath = "exit"
    """Whether the death of an engine ends the server, or the others go on, continue its streams,
    and it is started anew."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 0 to 65535, not {self.port}")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(
                f"--shutdown-timeout must not be negative, nor without end: {self.shutdown_timeout}"
            )
        if not 1 <= self.max_n <= MAX_SEQUENCES:
            raise ConfigError(f"--max-n must be from 1 to {MAX_SEQUENCES}, not {self.max_n}")
        if not 0 <= self.max_stored_responses <= MAX_STORED_RESPONSES:
            raise ConfigError(
                f"--max-stored-responses must be from 0 to {MAX_STORED_RESPONSES}, not"
                f" {self.max_stored_responses}"
            )
        if not 0 < self.send_timeout < math.inf:
            raise ConfigError(f"--send-timeout must be positive seconds, not {self.send_timeout}")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be at least 1, not {value}: nobody would be served")
        check_override(self.override_generation_config or {})
        self._check_web()
        self._check_tls()
        self._check_data_parallel()

    def _check_web(self) -> None:
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins has {origin!r}; an origin is scheme://host or"
                    " scheme://host:port, without a path or a slash at the end, or *"
                )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "--allow-credentials with the origin * would let every web site act in its"
                " visitors' names; name the origins"
            )
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"--root-path must begin with a slash and not end with one, not {self.root_path!r}"
            )

    def _check_tls(self) -> None:
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
                if getattr(self, name):
                    raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile")
        elif self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                "--ssl-cert-reqs asks clients for certificates; --ssl-ca-certs says whose are good"
            )

    def _check_data_parallel(self) -> None:
        if not 0 < self.placement_timeout < math.inf:
            raise ConfigError(
                f"--placement-timeout must be positive seconds, not {self.placement_timeout}"
            )
        if self.ray_address is not None and self.data_parallel_backend == "mp":
            raise ConfigError(
                "--ray-address goes with --data-parallel-backend ray; mp starts processes on this"
                " machine only"
            )
        if self.wire_port_range is not None:
            first, last = self.wire_port_range
            if not 1 <= first <= last <= 65535:
                raise ConfigError(
                    f"--wire-port-range must be two ports from 1 to 65535, the lower one first, not"
                    f" {first}-{last}"
                )
        check_strategy(self.engine.data_parallel_size, self.strategy, self.data_parallel_size_local)
        if self.data_parallel_rank is not None:
            self._check_external()
        elif self.is_hybrid:
            self._check_hybrid()
        elif self.backend == "mp" and self.num_local_ranks != self.engine.data_parallel_size:
            raise ConfigError(
                f"--data-parallel-size-local {self.num_local_ranks}: without a Ray cluster all"
                f" {self.engine.data_parallel_size} ranks run on this machine; for a server of its"
                " own on each node add --data-parallel-hybrid-lb"
            )

    def _check_external(self) -> None:
        size, rank = self.engine.data_parallel_size, self.data_parallel_rank
        if rank not in range(size):
            raise ConfigError(
                f"--data-parallel-rank must be from 0 to {size - 1} with --data-parallel-size"
                f" {size}, not {rank}"
            )
        if self.is_hybrid or self.data_parallel_size_local not in (None, 1):
            raise ConfigError(
                "--data-parallel-rank is for a server of one rank; it does not go with"
                " --data-parallel-hybrid-lb, -start-rank or -size-local"
            )

    def _check_hybrid(self) -> None:
        size, local = self.engine.data_parallel_size, self.data_parallel_size_local
        if local is None:
            raise ConfigError(
                "--data-parallel-hybrid-lb needs --data-parallel-size-local: ranks on each node"
            )
        if self.backend == "ray" and self.data_parallel_start_rank is not None:
            raise ConfigError(
                "--data-parallel-start-rank is for --data-parallel-backend mp; on a Ray cluster the"
                " placement numbers the ranks"
            )
        if self.backend == "ray" and self.port == 0:
            raise ConfigError(
                "--port 0 does not go with --data-parallel-hybrid-lb on a Ray cluster: each node's"
                " server would have a port that nobody knows"
            )
        start = self.data_parallel_start_rank or 0
        if not 0 <= start <= size - local:
            raise ConfigError(
                f"ranks {start} to {start + local - 1} (--data-parallel-start-rank {start},"
                f" --data-parallel-size-local {local}) are not within --data-parallel-size {size}"
            )

    @property
    def is_hybrid(self) -> bool:
        return self.data_parallel_hybrid_lb or self.data_parallel_start_rank is not None

    @property
    def num_local_ranks(self) -> int:
        return self.data_parallel_size_local or self.engine.data_parallel_size

    @property
    def num_local_devices(self) -> int:
        return self.num_local_ranks * self.engine.world_size

    @property
    def num_nodes(self) -> int:
        """How many get `num_local_ranks`: with hybrid balancing each has a server."""
        return self.engine.data_parallel_size // self.num_local_ranks

    @property
    def ranks(self) -> range:
        """The data-parallel ranks that this server speaks to."""
        if self.data_parallel_rank is not None:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        if self.is_hybrid:
            start = self.data_parallel_start_rank or 0
            return range(start, start + self.num_local_ranks)
        return range(self.engine.data_parallel_size)

    @property
    def queue_limit(self) -> int:
        """Sequences in flight at most, on all ranks of this server."""
        if self.max_num_queued_reqs is not None:
            return self.max_num_queued_reqs
        return len(self.ranks) * self.engine.max_num_seqs + DEFAULT_NUM_WAITING

    @property
    def backend(self) -> Backend:
        """As asked; unasked, Ray where an address is given or the command is a Ray job."""
        if self.data_parallel_backend is not None:
            return self.data_parallel_backend
        return "ray" if self.ray_address is not None or self.environment.is_ray_job else "mp"

    @property
    def strategy(self) -> Strategy:
        if self.data_parallel_placement is not None:
            return self.data_parallel_placement
        return "pack" if self.data_parallel_size_local is None else "strict"

    @property
    def log_level(self) -> str:
        return self.engine.log_level or self.environment.log_level or "INFO"

    @property
    def topology(self) -> Topology:
        return Topology(
            tensor_parallel_size=self.engine.tensor_parallel_size,
            pipeline_parallel_size=self.engine.pipeline_parallel_size,
            data_parallel_size=len(self.ranks),
            data_parallel_start_rank=self.ranks.start,
            api_server_count=self.api_server_count,
        )
