"""The back end `mp`: what it refuses before anything is spawned. That it runs is in
tests/integration."""

from pathlib import Path
from typing import Any

import pytest

from cluster import local_node
from cluster.config import EngineOptions, ResolvedModel, ServeConfig
from cluster.engine_group import Reach
from cluster.local_engines import LocalEngines
from engine.errors import ConfigError


def place(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, model_type: str = "llama", **options: Any
) -> Reach:
    gpus = [Path(f"/proc/driver/nvidia/gpus/{i}") for i in range(num_gpus)]
    monkeypatch.setattr(local_node, "_driver_entries", lambda: gpus)
    config = ServeConfig(engine=EngineOptions(model="m", **options), data_parallel_backend="mp")
    engines = LocalEngines(config, lambda *_: None, lambda *_: False)
    return engines.place(ResolvedModel(name="m", path=Path("m"), model_type=model_type))


def test_too_few_gpus_are_refused_before_anything_is_spawned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the comparison of the dry run, and with a way out."""
    with pytest.raises(ConfigError, match=r"has 1 GPU: room for 1\..*; --device cpu does without"):
        place(monkeypatch, 1, data_parallel_size=2)
    with pytest.raises(ConfigError, match="lower --tensor-parallel-size"):
        place(monkeypatch, 2, tensor_parallel_size=4)


@pytest.mark.parametrize(
    ("num_gpus", "model_type", "options"),
    [
        (2, "llama", {"data_parallel_size": 2}),
        (1, "llama", {"data_parallel_size": 64, "device": "cpu"}),
        (1, "scripted", {"data_parallel_size": 64}),
        (0, "llama", {"data_parallel_size": 64}),
        (0, "llama", {"device": "cuda"}),
    ],
)
def test_what_may_fit_is_left_to_the_workers(
    num_gpus: int, model_type: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs everything does; and a driver that shows no GPU need not be the last word."""
    assert place(monkeypatch, num_gpus, model_type, **options) == Reach()
