"""Checkpoints in all the ways they come, and one clear line for those that cannot be loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.config import ModelConfig
from engine.errors import ConfigError
from tests.helpers.plan_driver import PlanDriver, Sequence
from tests.helpers.tiny_models import clear_prompts, greedy_tokens, tiny_model
from tests.helpers.worker_settings import loaded_worker, worker_config
from workers import loader, resources
from workers.parallel import Parallel, Place
from workers.tensor_parallel import Cut

CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


@pytest.fixture
def copy_of(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model's folder, to be changed at will."""

    def copy(name: str) -> Path:
        source = tiny_model(name, tmp_path_factory.getbasetemp())
        return Path(shutil.copytree(source, tmp_path / "model"))

    return copy


def load(folder: Path, **settings: Any) -> loader.LoadedModel:
    config = worker_config(folder, **settings)
    alone = Parallel(Place(0, 1, 0, 1), "", CPU, timeout_s=1.0)
    return loader.load(config.model, alone, CPU, resources.num_local_workers(config))


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def assert_same_tokens(folder: Path, original: Path) -> None:
    (prompt,) = clear_prompts(original, 1, 8)
    worker = loaded_worker(worker_config(folder))
    output = PlanDriver(worker.execute_model).run([Sequence("a", prompt, 8)])[0]
    assert output == greedy_tokens(original, prompt, 8)


def test_gpt2_of_the_hub_is_loaded(
    copy_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its weights lack the `transformer.` of today's names, and it has masks that nobody needs."""
    folder = copy_of("gpt2")

    def rename(weights: Weights) -> Weights:
        mask = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}
        return {n.removeprefix("transformer."): w for n, w in weights.items()} | mask

    change_weights(folder, rename)
    assert_same_tokens(folder, tiny_model("gpt2", tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_an_image_model_is_loaded(
    copy_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, prefix: str
) -> None:
    """Gemma 3 from 4B up: the language model under a prefix (one of two), its settings in
    `text_config`."""
    folder = copy_of("gemma3")
    text_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text_config})
    )
    change_weights(folder, lambda ws: {n.replace("model.", prefix, 1): w for n, w in ws.items()})
    assert_same_tokens(folder, tiny_model("gemma3", tmp_path_factory.getbasetemp()))


def test_the_dtype_of_an_image_model_is_that_of_its_text_model(tmp_path: Path) -> None:
    """Said once, at the top of config.json: Gemma 3 of the hub would take twice the memory."""
    text_config = {"model_type": "gemma3_text", "num_hidden_layers": 1}
    config = {"model_type": "gemma3", "dtype": "bfloat16", "text_config": text_config}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert loader._dtype("auto", loader.read_config(tmp_path)) == torch.bfloat16


def test_a_checkpoint_in_shards_is_loaded(
    copy_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Several files and an index, as large models come."""
    folder = copy_of("llama")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        save_file({n: weights[n] for n in names if weight_map[n] == part}, folder / part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same_tokens(folder, tiny_model("llama", tmp_path_factory.getbasetemp()))


def drop_weight(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda weights: {n: w for n, w in weights.items() if n != name})


def shrink_weight(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda weights: weights | {name: weights[name][:-1].clone()})


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (drop_weight, "incomplete: they have no model.layers.1.mlp.up_proj.weight"),
        (shrink_weight, r"up_proj.weight has shape \(111, 64\); config.json says \(112, 64\)"),
        (truncate, "cannot read weight file .*model.safetensors"),
        (lambda f: change_config(f, num_attention_heads="many"), "'num_attention_heads' expected"),
        (lambda f: change_config(f, num_attention_heads=0), "cannot use this config.json"),
        (lambda f: change_config(f, hidden_act="loud"), "cannot use this config.json"),
        (
            lambda f: change_config(
                f, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "rotary embedding is 'dynamic'",
        ),
    ],
)
def test_broken_checkpoints_are_refused(
    copy_of: Callable[[str], Path], break_it: Callable[[Path], None], message: str
) -> None:
    """Each with a line of its own."""
    folder = copy_of("llama")
    break_it(folder)
    with pytest.raises(ConfigError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has what it needs and what there is; nothing has been allocated."""
    folder = copy_of("llama")
    change_config(folder, num_hidden_layers=200, intermediate_size=200_000)
    monkeypatch.setattr(resources, "available_memory", lambda: 1 << 30)
    with pytest.raises(ConfigError, match=r"weights needs 28\.\d\d GiB .*, and 1\.00 GiB are av"):
        load(folder)


def test_workers_that_only_fit_one_by_one_are_refused(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines that load at the same time see the same free memory: the total decides."""
    monkeypatch.setattr(resources, "total_memory", lambda: 1_000_000)
    folder = copy_of("llama")
    load(folder)
    with pytest.raises(ConfigError, match="one of 2 workers here"):
        load(folder, num_local_engines=2)


@pytest.mark.parametrize(
    ("asked", "in_config", "expected"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", None, torch.float32),
        ("float16", "bfloat16", torch.float16),
    ],
)
def test_dtype(
    copy_of: Callable[[str], Path], asked: str, in_config: str | None, expected: torch.dtype
) -> None:
    """ "auto" is what config.json says; buffers such as rotary frequencies stay as they are."""
    folder = copy_of("llama")
    change_config(folder, dtype=in_config)
    loaded = load(folder, dtype=asked)
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_weights_are_held_once(copy_of: Callable[[str], Path]) -> None:
    """Tied weights are one tensor, and nothing is left without memory."""
    loaded = load(copy_of("qwen2"))
    model = loaded.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert loaded.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def test_nothing_is_initialised_that_is_read_anyway(
    copy_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers for every weight, though without memory, take as long as all the rest."""
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda *_: pytest.fail("initialised"))
    assert load(copy_of("llama")).weight_bytes > 0


def test_a_part_that_is_filled_up_ends_in_zeros(tmp_path: Path) -> None:
    """Of three rows, the second of two ranks has one and a row of padding."""
    save_file({"w": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    weight = torch.full((2, 4), torch.nan)
    with loader._Checkpoint([tmp_path / "model.safetensors"], "") as checkpoint:
        whole = checkpoint.find("w", (3, 4), is_transposed=False)
        whole.read_into(weight, Cut(0, ((2, 3),), num_padding=1))
    assert weight.tolist() == [[1.0] * 4, [0.0] * 4]


def test_no_code_of_a_model_folder_is_run(copy_of: Callable[[str], Path]) -> None:
    """A folder that brings its own Python is loaded with ours, or not at all."""
    folder = copy_of("llama")
    (folder / "evil.py").write_text("raise SystemExit('run')")
    change_config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"})
    assert type(load(folder).model).__module__.startswith("transformers.")


def test_settings_have_no_default_for_trust() -> None:
    """`ModelConfig` has no field that would run a folder's code."""
    assert "trust_remote_code" not in ModelConfig.__slots__
