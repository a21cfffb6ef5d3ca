"""Sizes read from config.json alone: the same as transformers and the workers read them."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from engine.errors import ConfigError
from tests.helpers.tiny_models import ARCHITECTURES, tiny_model
from workers import loader
from workers.model_shape import DEFAULTS, ModelShape, check_options, read_shape
from workers.parallel import Parallel, Place
from workers.pipeline_parallel import stage_layers
from workers.supported import SCRIPTED, SUPPORTED_MODEL_TYPES
from workers.tensor_parallel import num_kv_heads, shard

GEMMA3_OF_THE_HUB = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34},
    "vision_config": {"hidden_size": 1152},
}


def assert_as_transformers(config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(folder).get_text_config()
    shape = read_shape(config)
    assert shape is not None
    num_heads = theirs.num_attention_heads
    inner = getattr(theirs, "intermediate_size", None) or getattr(theirs, "n_inner", None)
    assert shape == ModelShape(
        num_layers=theirs.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads(theirs),
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // num_heads,
        hidden_size=theirs.hidden_size,
        intermediate_size=inner or 4 * theirs.hidden_size,
        vocab_size=theirs.vocab_size,
        max_len=theirs.max_position_embeddings,
        is_tied=theirs.tie_word_embeddings,
        dtype="float32",
    )


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_what_a_config_leaves_out_is_transformers_default(model_type: str, tmp_path: Path) -> None:
    """Also with none of the sizes given; every architecture that we serve is known."""
    assert_as_transformers({"model_type": model_type}, tmp_path)
    assert {*DEFAULTS, "gemma3", SCRIPTED} == SUPPORTED_MODEL_TYPES


@pytest.mark.parametrize(
    "config",
    [
        GEMMA3_OF_THE_HUB,
        {"model_type": "gpt2", "n_inner": 96, "n_head": 4, "n_positions": 77},
        {"model_type": "gpt2", "hidden_size": 128, "num_hidden_layers": 2},
        {"model_type": "llama", "num_attention_heads": 8, "hidden_size": 64},
        {"model_type": "qwen2", "num_attention_heads": 4, "tie_word_embeddings": True},
    ],
)
def test_sizes_are_found_wherever_they_are(config: dict[str, Any], tmp_path: Path) -> None:
    """In the text part of an image model, and under GPT-2's own names or the common ones."""
    assert_as_transformers(config, tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_split_is_refused_exactly_when_the_workers_refuse_it(
    architecture: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Heads, KV heads, MLP and layers of each architecture, tried with the workers' own code."""
    folder = tiny_model(architecture, tmp_path_factory.getbasetemp())
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    assert shape is not None
    config = loader.read_config(folder)

    for ranks in range(1, 9):
        assert _is_refused(shard, *_whole_model(config), _unconnected(ranks)) == (
            _is_refused(shape.check_split, ranks, 1)
        ), ranks
        assert _is_refused(stage_layers, config.num_hidden_layers, Place(0, 1, 0, ranks)) == (
            _is_refused(shape.check_split, 1, ranks)
        ), ranks


def _whole_model(config: Any) -> tuple[Any, Any]:
    model = loader._on_meta(config, loader._dtype("auto", config))
    loader._use_linear(model)
    return model, config


def _unconnected(tensor_parallel_size: int) -> Parallel:
    """A rank that has not met the others."""
    parallel = Parallel.__new__(Parallel)
    parallel.place = Place(0, tensor_parallel_size, 0, 1)
    return parallel


def _is_refused(attempt: Callable[..., object], *args: Any) -> bool:
    with contextlib.suppress(ConfigError):
        attempt(*args)
        return False
    return True


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"model_type": "llama"}, {"tensor_parallel_size": 3}, "3 does not divide the model's 32"),
        (
            {"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 4},
            {"tensor_parallel_size": 6},
            "6 is no multiple of the model's 4 KV heads",
        ),
        (
            {"model_type": "llama", "intermediate_size": 11009},
            {"tensor_parallel_size": 2},
            "11009 features",
        ),
        ({"model_type": "gpt2"}, {"pipeline_parallel_size": 13}, "more than the model's 12 layers"),
        ({"model_type": "gpt2"}, {"max_model_len": 1025}, "must be from 1 to 1024"),
        ({"model_type": SCRIPTED, "max_position_embeddings": 9}, {"max_model_len": 10}, "1 to 9"),
    ],
)
def test_what_cannot_be_served_is_refused(
    config: dict[str, Any], options: dict[str, int], words: str
) -> None:
    """With the numbers, and in the words of the workers."""
    asked = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "max_model_len": None}
    with pytest.raises(ConfigError, match=words):
        check_options(config, **asked | options)  # type: ignore[arg-type] # a dict of options


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": ["llama"]},
        {"model_type": "llama", "num_attention_heads": "32"},
        {"model_type": "llama", "num_attention_heads": 0},
        {"model_type": "llama", "num_hidden_layers": None},
        {"model_type": "llama", "hidden_size": True},
        {"model_type": "gemma3", "text_config": 7},
        {"model_type": SCRIPTED},
    ],
)
def test_what_is_no_size_is_left_to_the_workers(config: dict[str, Any]) -> None:
    """Their message says what is wrong with the file; ours would only guess."""
    assert read_shape(config) is None
    check_options(config, tensor_parallel_size=3, pipeline_parallel_size=1, max_model_len=5)


def test_the_dtype_is_that_of_the_config() -> None:
    """Under both of its names; float32 where there is none that we compute in."""
    for key in ("dtype", "torch_dtype"):
        shape = read_shape({"model_type": "llama", key: "bfloat16"})
        assert shape is not None
        assert shape.dtype == "bfloat16"
    odd = read_shape({"model_type": "llama", "dtype": "float64"})
    assert odd is not None
    assert odd.dtype == "float32"
