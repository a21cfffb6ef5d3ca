"""Settings of one engine around a model folder, for tests that drive its workers by hand."""

import json
from pathlib import Path

from engine.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    LinearBackendName,
    ModelConfig,
    ParallelConfig,
    Quantization,
    WireConfig,
)
from engine.step import KVCacheSpec
from workers.worker import Worker

SPEC = KVCacheSpec(
    num_blocks=600, block_size=4, max_model_len=512, max_num_seqs=64, max_num_batched_tokens=256
)


def worker_config(
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dtype: str = "auto",
    attention_backend: str | None = None,
    device: str = "cpu",
    kv_cache_memory_bytes: int | None = None,
    num_local_engines: int = 1,
    kernel_cache_dir: str | None = None,
    linear_backend: LinearBackendName = "auto",
    quantization: Quantization | None = None,
) -> EngineConfig:
    """Return the settings of an engine on this model, with one thread per worker."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return EngineConfig(
        model=ModelConfig(
            path=str(folder),
            model_type=model_type,
            dtype=dtype,  # type: ignore[arg-type]
            quantization=quantization,
        ),
        wire=WireConfig(request_addresses=(), output_addresses=()),
        cache=CacheConfig(kv_cache_memory_bytes=kv_cache_memory_bytes),
        parallel=ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        executor=ExecutorConfig(
            num_threads=1,
            device=device,  # type: ignore[arg-type]
            attention_backend=attention_backend,
            num_local_engines=num_local_engines,
            execute_timeout_s=30.0,
            kernel_cache_dir=kernel_cache_dir,
            linear_backend=linear_backend,
        ),
    )


def loaded_worker(config: EngineConfig, spec: KVCacheSpec = SPEC) -> Worker:
    """Return the only worker of an engine, ready for plans."""
    worker = Worker(config, rank=0, rendezvous="")
    worker.load()
    worker.initialize_kv_cache(spec)
    return worker
