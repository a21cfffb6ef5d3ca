"""What the dry run says a model needs, against what the workers report once they have loaded it."""

import json
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.checkpoint import read_tensor_shapes
from cluster.config import EngineOptions
from cluster.estimate import ModelFacts, kv_budget, size_kv, worker_needs
from engine.config import ModelConfig
from engine.errors import ConfigError
from tests.helpers.server import ROOT, running_server
from tests.helpers.tiny_models import ARCHITECTURES, tiny_model
from workers import loader
from workers.causal_lm import CausalLM
from workers.model_shape import read_shape
from workers.parallel import Parallel, Place

GIB = 1 << 30


def facts_of(folder: Path) -> ModelFacts:
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    assert shape is not None
    return ModelFacts(shape=shape, tensors=read_tensor_shapes(folder), max_len=shape.max_len)


def unconnected(place: Place) -> Parallel:
    """A rank that has not met the others."""
    parallel = Parallel.__new__(Parallel)
    parallel.place = place
    parallel._tp_group = None
    return parallel


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_the_estimate_is_what_the_workers_load(
    architecture: str, sizes: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """To the byte, for the first tensor rank of each stage of every architecture, which has the
    most; and the KV bytes of a token."""
    tp_size, pp_size = sizes
    folder = tiny_model(architecture, tmp_path_factory.getbasetemp())
    settings = ModelConfig(path=str(folder), model_type=architecture, dtype="bfloat16")
    options = EngineOptions(
        model="m",
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        dtype="bfloat16",
    )

    needs = worker_needs(facts_of(folder), options)

    for pp_rank, need in enumerate(needs):
        parallel = unconnected(Place(0, tp_size, pp_rank, pp_size))
        loaded = loader.load(settings, parallel, torch.device("cpu"), num_local=1)
        assert need.weight_bytes == loaded.weight_bytes
        model = CausalLM(loaded, parallel, None, torch.device("cpu"))  # type: ignore[arg-type]
        assert need.num_layers == len(model.layers)
        assert need.kv_bytes_per_token == model.kv_shape.bytes_per_token * len(model.layers)


LLAMA = read_shape({"model_type": "llama"})
assert LLAMA is not None
FACTS = ModelFacts(shape=LLAMA, tensors={}, max_len=2048)


def test_the_kv_cache_follows_the_rules_of_workers_and_core() -> None:
    """As large as they make it, and the length is cut as they cut it."""
    options = EngineOptions(model="m", dtype="bfloat16")
    token_bytes = 2 * 32 * 128 * 2 * 32

    assert kv_budget(FACTS, options, 100 * GIB, 1) == GIB
    assert kv_budget(FACTS, options, 100 * GIB, 4) == GIB // 4
    assert kv_budget(FACTS, options, 2 * GIB, 1) == GIB // 2
    assert kv_budget(FACTS, replace(options, kv_cache_memory_bytes=5), 2 * GIB, 1) == 5
    size = size_kv(FACTS, options, GIB, 16)
    assert size.num_blocks == GIB // (16 * token_bytes)
    assert size.max_model_len == size.num_tokens == (size.num_blocks - 1) * 16 < 2048
    with pytest.raises(ConfigError, match="a request of max_model_len=2048 tokens needs"):
        size_kv(FACTS, replace(options, max_model_len=2048), GIB, 16)


def test_a_broken_weight_file_is_one_clear_line(tmp_path: Path) -> None:
    """Whatever is in it."""
    file = tmp_path / "model.safetensors"
    for content in (
        b"",
        b"version https://git-lfs",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": {}}',
        struct.pack("<Q", 19) + b'{"a": {"shape": 7}}',
        struct.pack("<Q", 50) + b"{",
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"cannot read weight file .*model\.safetensors"):
            read_tensor_shapes(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-tp", "2", "--kv-cache-memory-bytes", "1M")])
def test_the_dry_run_is_what_a_server_reports(
    flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Weights, tokens of KV cache and length of a tiny model, exactly, in the log of a real
    server."""
    folder = str(tiny_model("llama", tmp_path_factory.getbasetemp()))
    need = dry_run(folder, *flags)

    with running_server(folder, *flags) as server:
        assert reported(server.log) == need


@pytest.mark.slow
def test_the_dry_run_of_the_demo_is_what_its_server_reports() -> None:
    """Real weights of 270M parameters, in bfloat16: the bytes exactly; the default cache is as
    large as free memory lets it be, here within a tenth."""
    with running_server("demo") as server:
        weight_bytes, kv_tokens, max_model_len = reported(server.log)
    need = dry_run("demo")  # by now it has been converted

    assert need[0] == weight_bytes
    assert need[1] == pytest.approx(kv_tokens, rel=0.1)
    assert need[2] == pytest.approx(max_model_len, rel=0.1)


def dry_run(*args: str) -> tuple[int, int, int]:
    """Weights of the largest worker, tokens of KV cache, and length, by `raywire plan`."""
    result = subprocess.run(
        [sys.executable, "-m", "cluster", "plan", *args, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    need = json.loads(result.stdout)["ranks"][0]["need"]
    return need["weight_bytes"], need["kv_tokens"], need["max_model_len"]


def reported(log: str) -> tuple[int, int, int]:
    """The same, by the log of a server."""
    weights = max(map(int, re.findall(r"model loaded rank=\d+ weight_bytes=(\d+)", log)))
    size = re.search(r"kv_cache_size_tokens=(\d+) max_model_len=(\d+)", log)
    assert size is not None, log
    return weights, int(size[1]), int(size[2])
