"""Every environment variable that we read, in one place. Read once, by the command or the `LLM`
class.

A variable exists for what must be set before start or belongs to a machine rather than to a model;
everything else is a flag. `tests/cluster/test_interface.py` lists them all, so that adding one is a
decision.
"""

import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from engine.errors import ConfigError

StartMethod = Literal["fork", "spawn"]
T = TypeVar("T")

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

VARIABLES = {
    "RAYWIRE_ADMIN_KEY": "opens the routes of an administrator, which are not there without one",
    "RAYWIRE_API_KEY": "keys of the API, one or several with blanks between; or --api-key-file",
    "RAYWIRE_CACHE_DIR": "converted models are kept here (default: ~/.cache/raywire)",
    "RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS": "a step without an answer has failed (default: 300)",
    "RAYWIRE_LOG_LEVEL": "DEBUG, INFO, WARNING or ERROR; --log-level goes first (default: INFO)",
    "RAYWIRE_METRICS_KEY": "opens /metrics, as the keys of the API do where there are any",
    "RAYWIRE_MQ_MAX_CHUNK_BYTES_MB": "chunk of the shared-memory rings, in MiB (default: 16)",
    "RAYWIRE_RPC_BASE_PATH": "folder of the ipc sockets (default: the system's temporary folder)",
    "RAYWIRE_WORKER_MULTIPROC_METHOD": "fork or spawn, for workers and for the engine of an LLM",
}
"""Name to meaning, as `raywire serve --help` shows them."""

SECRETS = ("RAYWIRE_ADMIN_KEY", "RAYWIRE_API_KEY", "RAYWIRE_METRICS_KEY")
"""Those that no other process gets to see."""

RAY_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for the entrypoint of a submitted job, and nowhere else: how we know to be one."""

RAY_STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""How long `ray job stop` lets the entrypoint drain before it kills; 3 s where it is not set."""

_COUNTERPARTS = {
    "VLLM_API_KEY": "RAYWIRE_API_KEY",
    "VLLM_API_SERVER_COUNT": "--api-server-count",
    "VLLM_CACHE_ROOT": "RAYWIRE_CACHE_DIR",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes",
    "VLLM_ENGINE_READY_TIMEOUT_S": "--startup-timeout",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "VLLM_LOGGING_LEVEL": "RAYWIRE_LOG_LEVEL",
    "VLLM_MAX_N_SEQUENCES": "--max-n",
    "VLLM_MQ_MAX_CHUNK_BYTES_MB": "RAYWIRE_MQ_MAX_CHUNK_BYTES_MB",
    "VLLM_RAY_DP_PACK_STRATEGY": "--data-parallel-placement",
    "VLLM_RPC_BASE_PATH": "RAYWIRE_RPC_BASE_PATH",
    "VLLM_WORKER_MULTIPROC_METHOD": "RAYWIRE_WORKER_MULTIPROC_METHOD",
}
"""vLLM's variables whose work something of ours does."""

# Kubernetes sets these in every pod of a namespace with a Service called `raywire`: not the user's
# doing, and `RAYWIRE_PORT=tcp://…` has broken other servers' starts under their own name.
_SERVICE_LINK = re.compile(r"RAYWIRE(_\w+)?_(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The variables' values, checked."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    metrics_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    cache_dir: Path = Path("~/.cache/raywire")
    execute_model_timeout_s: float = 300.0
    log_level: str | None = None
    mq_max_chunk_bytes: int = 16 << 20
    rpc_base_path: str | None = None
    worker_multiproc_method: StartMethod | None = None
    cuda_visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES, which CUDA itself obeys; None where it is not set."""
    is_ray_job: bool = False
    """Whether this is the entrypoint of a job submitted to a Ray cluster."""
    ray_job_stop_wait_s: float = 3.0
    """Seconds from the stop of that job to its SIGKILL (`ray_job`)."""


def read(environ: Mapping[str, str]) -> Environment:
    """Read our variables; an empty one counts as unset.

    Raises:
        ConfigError: a value is of the wrong type or out of bounds.
    """

    def get(name: str, convert: Callable[[str], T], default: T) -> T:
        text = environ.get(name, "").strip()
        try:
            return convert(text) if text else default
        except ValueError as error:
            raise ConfigError(f"{name}={text}: {error}") from None

    return Environment(
        api_keys=tuple(environ.get("RAYWIRE_API_KEY", "").split()),
        metrics_keys=tuple(environ.get("RAYWIRE_METRICS_KEY", "").split()),
        admin_keys=tuple(environ.get("RAYWIRE_ADMIN_KEY", "").split()),
        cache_dir=get("RAYWIRE_CACHE_DIR", _folder, _folder("~/.cache/raywire")),
        execute_model_timeout_s=get("RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", _seconds, 300.0),
        log_level=get("RAYWIRE_LOG_LEVEL", log_level, None),
        mq_max_chunk_bytes=get("RAYWIRE_MQ_MAX_CHUNK_BYTES_MB", _mebibytes, 16 << 20),
        rpc_base_path=get("RAYWIRE_RPC_BASE_PATH", str, "") or None,
        worker_multiproc_method=get("RAYWIRE_WORKER_MULTIPROC_METHOD", _start_method, None),
        cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        is_ray_job=bool(environ.get(RAY_JOB_VARIABLE)),
        ray_job_stop_wait_s=get(RAY_STOP_VARIABLE, _seconds, 3.0),
    )


def take_secrets(environ: MutableMapping[str, str]) -> None:
    """Take what is secret out of the environment, once it has been read: children inherit it, and
    whoever lists their environment would see it."""
    for name in SECRETS:
        environ.pop(name, None)


def _folder(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # no such user, or no home
        raise ValueError(error) from None


def warnings(environ: Mapping[str, str]) -> list[str]:
    """One line for each variable that the user may believe to work, but does not."""
    lines = [
        f"{name} is vLLM's and has no effect here; use {ours}"
        for name, ours in sorted(_COUNTERPARTS.items())
        if environ.get(name)
    ]
    unknown = sorted(
        name
        for name in environ
        if name.startswith("RAYWIRE_")
        and name not in VARIABLES
        and not _SERVICE_LINK.fullmatch(name)
    )
    return lines + [
        f"{name} is no variable of raywire; see `raywire serve --help`" for name in unknown
    ]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise ValueError("must be a positive number of seconds")
    return seconds


def _mebibytes(text: str) -> int:
    mebibytes = int(text)
    if not 1 <= mebibytes <= 1024:
        raise ValueError("must be from 1 to 1024 MiB")
    return mebibytes << 20


def log_level(text: str) -> str:
    """Return the level of that name, however it is written. Raises ValueError if there is none."""
    if text.upper() not in LOG_LEVELS:
        raise ValueError(f"must be one of {', '.join(LOG_LEVELS)}")
    return text.upper()


def _start_method(text: str) -> StartMethod:
    match text:
        case "fork" | "spawn":
            return text
        case _:
            raise ValueError("must be fork or spawn")
