"""What a model needs of each worker, before anything is loaded. Pure: from the sizes in config.json
and the shapes in the weight files. Used by the dry run, and by a start for what it can refuse.

A worker holds the layers of its pipeline stage, cut by the tensor-parallel size, and the ends of
the model:

    embedding    first stage: whole; cut where the head shares it, and then on the last stage too
    layers       matrices are cut, norms are whole; KV heads that ranks share are on each of them
    head         last stage, cut by vocabulary

That is the loader's rule, so the estimate is off only by what no file tells: what torch and a step
need beside it, some hundred MiB for each worker. The size of the KV cache comes from the very
functions that the workers and the engine core use.
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.checkpoint import Shape
from cluster.config import EngineOptions
from engine.config import DType, ModelConfig
from engine.kv_sizing import KVCacheSize, size_kv_cache
from engine.step import WorkerReport
from workers.model_shape import ModelShape, read_shape
from workers.resources import cpu_kv_budget
from workers.supported import SCRIPTED_KV_BYTES_PER_TOKEN, SCRIPTED_KV_CACHE_BYTES

CPU_BLOCK_SIZE = 16
"""Tokens of a KV block, as attention on CPUs reads it best. The smallest that is not asked for."""

_ITEM_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.(?P<part>.+)")
_NOT_LOADED = re.compile(
    r"(^|\.)(vision_tower|multi_modal_projector)\."  # of an image model, the text part is served
    r"|\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$"  # computed, but old files have them
)
_CUT_BIAS = re.compile(r"\.(q_proj|gate_proj|up_proj|c_attn|c_fc)\.bias$")
_KV = re.compile(r"\.(k_proj|v_proj)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a model without loading it."""

    shape: ModelShape | None
    """None: the scripted model, which has neither layers nor weights."""

    tensors: Mapping[str, Shape]
    """All of its weight files, by name."""

    max_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNeed:
    """What the largest worker of a pipeline stage needs."""

    num_layers: int
    weight_bytes: int
    kv_bytes_per_token: int


def dtype_of(facts: ModelFacts, asked: DType) -> DType:
    """What the workers will compute in."""
    if facts.shape is None:
        return "float32"
    return facts.shape.dtype if asked == "auto" else asked


def worker_needs(facts: ModelFacts, options: EngineOptions) -> tuple[WorkerNeed, ...]:
    """By pipeline stage."""
    tp_size, pp_size = options.tensor_parallel_size, options.pipeline_parallel_size
    if (shape := facts.shape) is None:
        scripted = WorkerNeed(
            num_layers=0, weight_bytes=0, kv_bytes_per_token=SCRIPTED_KV_BYTES_PER_TOKEN
        )
        return (scripted,) * pp_size
    item_bytes = _ITEM_BYTES[dtype_of(facts, options.dtype)]
    kv_heads = max(1, shape.num_kv_heads // tp_size)
    weights = _weights(shape, facts.tensors, tp_size, pp_size)
    return tuple(
        WorkerNeed(
            num_layers=len(layers),
            weight_bytes=num_weights * item_bytes,
            kv_bytes_per_token=2 * kv_heads * shape.head_dim * item_bytes * len(layers),
        )
        for layers, num_weights in zip(_stages(shape.num_layers, pp_size), weights, strict=True)
    )


def kv_budget(
    facts: ModelFacts, options: EngineOptions, free_bytes: int, num_local_engines: int
) -> int:
    """Bytes of KV cache of each worker on CPU.

    Args:
        facts: of the model.
        options: as the user chose.
        free_bytes: memory of the node that is left once all weights are loaded.
        num_local_engines: engine cores on the node.
    """
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    if facts.shape is None:
        return SCRIPTED_KV_CACHE_BYTES
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    return cpu_kv_budget(max(0, free_bytes), world_size, num_local_engines)


def size_kv(
    facts: ModelFacts, options: EngineOptions, budget_bytes: int, default_block_size: int
) -> KVCacheSize:
    """The KV cache of an engine whose workers have so much for it.

    Raises:
        ConfigError: it cannot hold what was asked; as the engine core will say.
    """
    reports = [
        WorkerReport(
            rank=rank,
            dtype=dtype_of(facts, options.dtype),
            vocab_size=facts.shape.vocab_size if facts.shape is not None else 1,
            model_max_len=facts.max_len,
            kv_bytes_per_token=need.kv_bytes_per_token,
            kv_budget_bytes=budget_bytes,
            block_size=default_block_size,
        )
        for rank, need in enumerate(worker_needs(facts, options))
    ]
    asked = ModelConfig(path="", model_type="", max_model_len=options.max_model_len)
    return size_kv_cache(reports, asked, options.cache_config())


def check_cache(config: Mapping[str, Any], options: EngineOptions) -> None:
    """Raise ConfigError where config.json shows that the KV cache which was asked for holds no
    request of the length which was asked for. In blocks of the smallest size, so that nothing is
    refused that a worker would take."""
    shape = read_shape(config)
    budget = options.kv_cache_memory_bytes
    is_known = options.num_gpu_blocks_override is None and options.max_model_len != "auto"
    if shape is not None and budget is not None and is_known:
        facts = ModelFacts(shape=shape, tensors={}, max_len=shape.max_len)
        size_kv(facts, options, budget, CPU_BLOCK_SIZE)


def _stages(num_layers: int, pp_size: int) -> list[range]:
    """The layers of each stage, as `workers/pipeline_parallel.py` has them."""
    each, more = divmod(num_layers, pp_size)
    firsts = [rank * each + min(rank, more) for rank in range(pp_size + 1)]
    return [range(first, end) for first, end in itertools.pairwise(firsts)]


def _weights(
    shape: ModelShape, tensors: Mapping[str, Shape], tp_size: int, pp_size: int
) -> list[int]:
    """How many numbers the first tensor rank of each stage holds; it has the most."""
    stage_of = {
        layer: stage
        for stage, layers in enumerate(_stages(shape.num_layers, pp_size))
        for layer in layers
    }
    totals = [0] * pp_size
    for name, size in tensors.items():
        if _NOT_LOADED.search(name):
            continue
        if (layer := _LAYER.search(name)) is not None:
            stages = [stage_of[int(layer[1])]] if int(layer[1]) in stage_of else []
            count = _cut(f".{layer['part']}", size, shape, tp_size)
        else:
            stages, count = _ends(name, size, shape, tp_size, pp_size)
        for stage in stages:
            totals[stage] += count
    return totals


def _cut(part: str, size: Shape, shape: ModelShape, tp_size: int) -> int:
    """What a rank holds of a layer's weight."""
    total = math.prod(size)
    is_bias = part.endswith(".bias")
    if _KV.search(part) and (is_bias or len(size) > 1):
        return total * max(1, shape.num_kv_heads // tp_size) // shape.num_kv_heads
    return total // tp_size if len(size) > 1 or _CUT_BIAS.search(part) else total


def _ends(
    name: str, size: Shape, shape: ModelShape, tp_size: int, pp_size: int
) -> tuple[list[int], int]:
    """Who holds a weight that is in no layer, and how much of it."""
    first, last = 0, pp_size - 1
    total = math.prod(size)
    by_vocabulary = -(-size[0] // tp_size) * math.prod(size[1:]) if size else total
    if name.endswith(("embed_tokens.weight", "wte.weight")):
        if shape.is_tied:
            return sorted({first, last}), by_vocabulary
        return [first], total
    if name.endswith("lm_head.weight"):
        return ([] if shape.is_tied else [last]), by_vocabulary
    if name.endswith("wpe.weight"):
        return [first], total
    return [last], total
