"""A stack of layers in one call computes what its layers do one by one, bit by bit; where it could
not, they go on as before."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.helpers.built_kernels import backend
from workers import patcher
from workers.attention import select
from workers.attention.base import AttentionBackend
from workers.attention.native import NativeAttention
from workers.attention.reference import ReferenceAttention
from workers.forward_context import BatchLayout, ForwardContext, forward_context
from workers.kv_cache import LayerKV
from workers.linear import NativeLinear
from workers.parallel import Place
from workers.patcher import FusedBackbone
from workers.pipeline_parallel import keep_stage

BF16 = torch.bfloat16
MAX_LEN = 4096
COMMON = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
KINDS = [f"{kind}_attention" for kind in ("sliding", "full", "sliding")]
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(num_hidden_layers=3, **COMMON),
    "llama3": lambda: LlamaConfig(num_hidden_layers=2, rope_parameters=LLAMA3_ROPE, **COMMON),
    "linear": lambda: LlamaConfig(num_hidden_layers=2, rope_parameters=LINEAR_ROPE, **COMMON),
    "qwen2": lambda: Qwen2Config(num_hidden_layers=2, tie_word_embeddings=True, **COMMON),
    "qwen3": lambda: Qwen3Config(num_hidden_layers=2, **COMMON),
    "mistral": lambda: MistralConfig(num_hidden_layers=2, sliding_window=12, **COMMON),
    # All inputs fill matrix registers, and rows of the MLP lie farther apart than they are long.
    "wide": lambda: LlamaConfig(num_hidden_layers=2, **{**COMMON, "intermediate_size": 128}),
    "gemma3": lambda: Gemma3TextConfig(
        num_hidden_layers=3,
        query_pre_attn_scalar=32,
        sliding_window=8,
        layer_types=KINDS,
        tie_word_embeddings=True,
        **COMMON,
    ),
}
# Of a step's requests, the new tokens and all of them: decodes, a prefill, a chunk of one.
MIXED = [(1, 1), (1, 40), (30, 30), (9, 77)]
DECODES = [(1, 18)]


def model_of(architecture: str, place: Place | None = None) -> Any:
    """A random model, or a stage of it, as it is before it is patched."""
    select.register()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(
            CONFIGS[architecture](), dtype=BF16, attn_implementation=select.IMPLEMENTATION
        )
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases would be ones and zeros
                parameter.data += 0.2 * torch.randn(parameter.shape)
            else:
                parameter.data *= 4
    if place is not None:
        keep_stage(model, model.config, place)
    return model.eval().requires_grad_(False)


def patched(architecture: str, place: Place | None = None) -> Any:
    model = model_of(architecture, place)
    patcher.patch(model, backend())
    return model


class Batch:
    """A step's tokens and the pages of all layers, the same whenever it is made."""

    def __init__(self, requests: list[tuple[int, int]], block_size: int = 4) -> None:
        random = np.random.default_rng(6)
        query_lens, seq_lens = (np.array(column) for column in zip(*requests, strict=True))
        num_blocks = -(-seq_lens // block_size)
        free = iter(random.permutation(num_blocks.sum()).tolist())
        table = np.zeros((len(requests), num_blocks.max()), np.int32)
        for row, count in enumerate(num_blocks):
            table[row, :count] = list(itertools.islice(free, int(count)))
        rows = np.repeat(np.arange(len(requests)), query_lens)
        positions = np.concatenate([np.arange(end - n, end) for n, end in requests])
        slots = table[rows, positions // block_size] * block_size + positions % block_size
        query_start = np.concatenate([[0], np.cumsum(query_lens)])
        self.ids = torch.from_numpy(random.integers(0, COMMON["vocab_size"], len(positions)))
        self.positions = torch.from_numpy(positions)
        self.layout = BatchLayout(
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            block_table=torch.from_numpy(table),
            slot_mapping=torch.from_numpy(slots.astype(np.int64)),
            query_start_cpu=query_start,
            seq_lens_cpu=seq_lens,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            block_size=block_size,
        )
        self.page_shape = (int(num_blocks.sum()), block_size, 2, COMMON["head_dim"])

    def pages(self, layers: range) -> dict[int, LayerKV]:
        random = torch.Generator().manual_seed(7)
        return {
            index: LayerKV(
                *(torch.randn(self.page_shape, generator=random).to(BF16) for _ in range(2))
            )
            for index in layers
        }

    @torch.inference_mode()
    def run(
        self,
        backbone: nn.Module,
        layers: range = range(3),
        attention: AttentionBackend | None = None,
        **inputs: Tensor,
    ) -> list[Tensor]:
        """Return the last states and all pages."""
        attention = attention or NativeAttention(backend().kernels)
        kv_cache = self.pages(layers)
        attention.prepare(self.layout)
        with forward_context(ForwardContext(self.layout, kv_cache, attention)):
            output = backbone(
                **(inputs or {"input_ids": self.ids[None]}),
                position_ids=self.positions[None],
                use_cache=False,
            )
        return [output.last_hidden_state, *(part for kv in kv_cache.values() for part in kv)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("requests", [MIXED, DECODES, [(130, 130)]], ids=["mixed", "one", "long"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_layers_in_one_call_give_the_same_bits(
    architecture: str, requests: list[tuple[int, int]]
) -> None:
    """States and KV pages, for decodes and prefills together, with windows and without, for every
    kind of rotary embedding that depends on the position alone."""
    backbone = patched(architecture).base_model
    assert isinstance(backbone, FusedBackbone)
    batch = Batch(requests)
    assert_same(batch.run(backbone), batch.run(backbone.original))


@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["mixed", "one"])
@pytest.mark.parametrize("architecture", ["gemma3", "qwen2"])
def test_quantized_layers_give_the_same_bits_too(
    architecture: str, requests: list[tuple[int, int]]
) -> None:
    """With the embedding that shares its weight, and biases."""
    model = model_of(architecture)
    patcher.patch(model, NativeLinear(backend().kernels, "int8"))
    backbone, batch = model.base_model, Batch(requests)
    assert isinstance(backbone, FusedBackbone)
    assert backbone.original.layers[0].self_attn.qkv_proj.packed.dtype == torch.int8
    assert_same(batch.run(backbone), batch.run(backbone.original))


@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
def test_every_pipeline_stage_runs_in_one_call(architecture: str) -> None:
    """The first takes ids, the second states; only the last norms them. Together they compute what
    a single rank does."""
    batch, states = Batch(MIXED), Tensor()
    whole = batch.run(patched(architecture).base_model)
    pages: list[Tensor] = []
    for rank, layers in enumerate((range(2), range(2, 3))):
        backbone = patched(architecture, Place(0, 1, rank, 2)).base_model
        assert isinstance(backbone, FusedBackbone)
        inputs = {"inputs_embeds": states} if rank else {}
        batch_pages = batch.pages(range(3))
        states, *found = run_stage(batch, backbone, {i: batch_pages[i] for i in layers}, inputs)
        pages += found
    assert_same([states, *pages], whole)


@torch.inference_mode()
def run_stage(
    batch: Batch, backbone: nn.Module, kv_cache: dict[int, LayerKV], inputs: dict[str, Tensor]
) -> list[Tensor]:
    attention = NativeAttention(backend().kernels)
    attention.prepare(batch.layout)
    with forward_context(ForwardContext(batch.layout, kv_cache, attention)):
        output = backbone(
            **(inputs or {"input_ids": batch.ids[None]}), position_ids=batch.positions[None]
        )
    return [output.last_hidden_state, *(part for kv in kv_cache.values() for part in kv)]


def test_positions_beyond_the_first_tables_are_computed_when_they_come() -> None:
    """And those before them stay right."""
    backbone = patched("gemma3").base_model
    for requests in ([(1, 1024)], [(3, 1025), (1, 5)], [(2, 3000)], [(1, 7)]):
        batch = Batch(requests, block_size=16)
        assert_same(batch.run(backbone), batch.run(backbone.original))


def test_pages_that_are_allocated_anew_are_found() -> None:
    """A cache may come after the model, and another after that."""
    backbone = patched("qwen3").base_model
    for requests in (DECODES, MIXED, DECODES):
        batch = Batch(requests)
        assert_same(batch.run(backbone), batch.run(backbone.original))


def test_other_attention_runs_layer_by_layer() -> None:
    """A back end that the user has chosen is the one that computes."""
    backbone, batch = patched("llama").base_model, Batch(MIXED)
    asked = CountingAttention()
    ours = batch.run(backbone, attention=asked)
    assert asked.num_calls == len(backbone.original.layers)
    assert_same(ours, batch.run(backbone.original, attention=ReferenceAttention()))


class CountingAttention(ReferenceAttention):
    num_calls = 0

    def forward(self, *args: Any) -> Tensor:
        self.num_calls += 1
        return super().forward(*args)


def hook_down_projection(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.register_forward_hook(lambda _, __, found: 2 * found)


def hook_attention_output(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda _, __, found: 2 * found)


def hook_layer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda _, __, found: 2 * found)


def test_heads_that_are_rotated_in_part_are_left_to_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention is given cosines that are shorter than a head, which no probe of it alone shows."""
    monkeypatch.setitem(
        CONFIGS,
        "nemotron",
        lambda: NemotronConfig(num_hidden_layers=2, partial_rotary_factor=0.5, **COMMON),
    )
    model, batch = model_of("nemotron"), Batch(MIXED)
    exact = batch.run(model.base_model, attention=ReferenceAttention())
    patcher.patch(model, backend())
    assert patcher.agree(batch.run(model.base_model)[0], exact[0])


class TwiceTheLayer(nn.Module):
    """A layer that is not known."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * self.layer(*args, **kwargs)  # type: ignore[no-any-return]


def replace_layer(model: Any) -> None:
    model.model.layers[1] = TwiceTheLayer(model.model.layers[1])


@pytest.mark.parametrize(
    "change", [hook_down_projection, hook_attention_output, hook_layer, replace_layer]
)
def test_layers_with_hooks_or_of_another_kind_run_one_by_one(change: Callable[[Any], None]) -> None:
    """What a hook or a stranger does is done: it doubles what passes, and that shows."""
    model, plain, batch = model_of("llama"), model_of("llama"), Batch(MIXED)
    change(model)
    exact = batch.run(model.base_model, attention=ReferenceAttention())
    unchanged = batch.run(plain.base_model, attention=ReferenceAttention())

    patcher.patch(model, backend())

    assert not isinstance(model.base_model, FusedBackbone)
    ours = batch.run(model.base_model)
    assert patcher.agree(ours[0], exact[0])
    assert not patcher.agree(unchanged[0], exact[0])


def test_a_backbone_that_does_more_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """All its parts are known, but it scales what comes out: one line says so, and it stays."""
    model = model_of("llama")
    forward = model.model.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.last_hidden_state = 2 * output.last_hidden_state
        return output

    model.model.forward = twice
    with caplog.at_level(logging.INFO):
        patcher.patch(model, backend())
    assert not isinstance(model.base_model, FusedBackbone)
    lines = [record.message for record in caplog.records if "left alone" in record.message]
    assert len(lines) == 1
    assert lines[0].startswith("backbone model left alone")
