"""Tensor parallelism: which part of each weight a rank keeps, and the collectives in between.

Driven by the model's own `base_model_tp_plan`, which gives a style to the names of its layers:

    colwise                 split by outputs: each rank computes some heads or features
    rowwise                 split by inputs: each rank has a partial sum, all-reduced after
    colwise_gather_output   split by outputs, gathered after: the head, by vocabulary
    embedding_rowwise       split by vocabulary: others' tokens are zero, all-reduced after

A split is a cut of the parameters, which `loader` reads the slices for, and a hook that adds the
collective. Fewer KV heads than ranks: ranks share them, each with a copy.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from workers.parallel import Parallel, divide

# GPT-2 has no plan of its own. Its first projection is query, key and value in one.
_OVERRIDES: dict[str, dict[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": "colwise_fused_qkv",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
}


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a weight that a rank keeps."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """Along `dim` of the whole weight, one after the other."""
    num_padding: int = 0
    """Zeros after them, so that all ranks have the same size."""

    @property
    def size(self) -> int:
        return sum(last - first for first, last in self.ranges) + self.num_padding


def shard(model: Any, config: Any, parallel: Parallel) -> dict[str, Cut]:
    """Shrink a model's parameters to this rank's part, and add the collectives.

    Args:
        model: transformers' causal language model, on the meta device, its stage already cut out.
        config: its configuration.
        parallel: who we are, and the collectives.

    Returns:
        By parameter name, what to read of the checkpoint; parameters that are not in it stay whole.

    Raises:
        ConfigError: the model has no plan, or does not divide by the number of ranks.
    """
    if parallel.place.tp_size == 1:
        return {}
    return _Sharder(model, config, parallel).shard()


class _Sharder:
    def __init__(self, model: Any, config: Any, parallel: Parallel) -> None:
        self._model = model
        self._config = config
        self._parallel = parallel
        self._rank, self._size = parallel.place.tp_rank, parallel.place.tp_size
        self._num_kv_heads = num_kv_heads(config)
        self._cuts: dict[str, Cut] = {}

    def shard(self) -> dict[str, Cut]:
        self._check_heads()
        plan = self._plan()
        for name, module in self._model.named_modules():
            if (style := _style_of(name, plan)) is not None:
                self._apply(style, name, module)
        return self._cuts

    def _plan(self) -> dict[str, str]:
        config, model = self._config, self._model
        plan = _OVERRIDES.get(config.model_type) or config.base_model_tp_plan
        if not plan:
            raise ConfigError(
                f"{config.model_type} has no tensor plan; use --tensor-parallel-size 1"
            )
        names = {id(module): name for name, module in model.named_modules()}
        by_name = {f"{model.base_model_prefix}.{pattern}": style for pattern, style in plan.items()}
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None:  # the last pipeline stage's
            by_name[names[id(head)]] = "colwise_gather_output"
        if config.tie_word_embeddings and isinstance(embedding, nn.Embedding):
            # They share one weight, so they are cut alike.
            by_name[names[id(embedding)]] = "embedding_rowwise"
        return by_name

    def _check_heads(self) -> None:
        divide(self._config.num_attention_heads, self._size, "attention heads")
        if self._num_kv_heads < self._size:
            if self._size % self._num_kv_heads:
                raise ConfigError(
                    f"--tensor-parallel-size {self._size} is no multiple of the model's"
                    f" {self._num_kv_heads} KV heads, which its ranks would share"
                )
        else:
            divide(self._num_kv_heads, self._size, "KV heads")

    def _apply(self, style: str, name: str, module: nn.Module) -> None:
        match style:
            case "colwise":
                assert isinstance(module, nn.Linear)
                self._cut_outputs(name, module, (self._output_range(name, module.out_features),))
            case "colwise_fused_qkv":
                assert isinstance(module, nn.Linear)
                self._cut_fused_qkv(name, module)
            case "rowwise":
                assert isinstance(module, nn.Linear)
                self._cut_inputs(name, module)
            case "colwise_gather_output":
                assert isinstance(module, nn.Linear)
                self._cut_head(name, module)
            case "embedding_rowwise":
                assert isinstance(module, nn.Embedding)
                self._cut_embedding(name, module)
            case "replicated_with_grad_allreduce":
                pass  # whole on every rank; the gradient is not our concern
            case _:
                raise ConfigError(
                    f"the model's tensor plan wants {style!r} for {name}, which is not supported;"
                    " use --tensor-parallel-size 1"
                )

    def _output_range(self, name: str, total: int) -> tuple[int, int]:
        if name.endswith((".k_proj", ".v_proj")):
            num_heads = self._num_kv_heads
            head_size = total // num_heads
            first = self._rank * num_heads // self._size
            return first * head_size, (first + max(1, num_heads // self._size)) * head_size
        return self._even_range(total, f"outputs of {name}")

    def _even_range(self, total: int, what: str) -> tuple[int, int]:
        size = divide(total, self._size, what)
        return self._rank * size, (self._rank + 1) * size

    def _vocabulary(self, total: int) -> Cut:
        size = -(-total // self._size)
        first, last = min(total, self._rank * size), min(total, (self._rank + 1) * size)
        return Cut(0, ((first, last),), num_padding=size - (last - first))

    def _cut_outputs(
        self,
        name: str,
        module: nn.Linear,
        ranges: tuple[tuple[int, int], ...],
        num_padding: int = 0,
    ) -> None:
        cut = Cut(0, ranges, num_padding)
        module.out_features = cut.size
        self._cut_parameter(module, name, "weight", cut)
        if module.bias is not None:
            self._cut_parameter(module, name, "bias", cut)

    def _cut_fused_qkv(self, name: str, module: nn.Linear) -> None:
        each = module.out_features // 3
        first, last = self._even_range(each, f"outputs of {name}")
        self._cut_outputs(
            name, module, tuple((part * each + first, part * each + last) for part in range(3))
        )
        # Its owner takes the output apart at this size.
        self._model.get_submodule(name.rpartition(".")[0]).split_size = last - first

    def _cut_inputs(self, name: str, module: nn.Linear) -> None:
        cut = Cut(1, (self._even_range(module.in_features, f"inputs of {name}"),))
        module.in_features = cut.size
        self._cut_parameter(module, name, "weight", cut)
        if self._rank > 0:
            module.register_parameter("bias", None)  # added once, by the first rank
        module.register_forward_hook(lambda _, __, partial: self._parallel.all_reduce(partial))

    def _cut_head(self, name: str, module: nn.Linear) -> None:
        num_outputs = module.out_features
        cut = self._vocabulary(num_outputs)
        self._cut_outputs(name, module, cut.ranges, cut.num_padding)

        def gather(_: nn.Module, __: object, part: Tensor) -> Tensor:
            whole = self._parallel.gather(part)
            # The other ranks go on with their part, and nobody reads what becomes of it.
            return part if whole is None else whole[..., :num_outputs]

        module.register_forward_hook(gather)

    def _cut_embedding(self, name: str, module: nn.Embedding) -> None:
        cut = self._vocabulary(module.num_embeddings)
        module.num_embeddings = cut.size
        module.padding_idx = None  # matters in training only, and may lie outside our part
        self._cut_parameter(module, name, "weight", cut)
        _VocabularyPart(cut.ranges[0], self._parallel).attach(module)

    def _cut_parameter(self, module: nn.Module, name: str, leaf: str, cut: Cut) -> None:
        whole = getattr(module, leaf)
        shape = list(whole.shape)
        shape[cut.dim] = cut.size
        part = torch.empty(shape, dtype=whole.dtype, device="meta")
        setattr(module, leaf, nn.Parameter(part, requires_grad=False))
        self._cuts[f"{name}.{leaf}"] = cut


class _VocabularyPart:
    """Makes an embedding look up its own tokens only, and add up those of all ranks."""

    def __init__(self, token_ids: tuple[int, int], parallel: Parallel) -> None:
        self._first, self._last = token_ids
        self._parallel = parallel

    def attach(self, embedding: nn.Embedding) -> None:
        embedding.register_forward_pre_hook(self._look_up)
        embedding.register_forward_hook(self._add_up)

    def _look_up(self, _: nn.Module, args: tuple[Tensor]) -> Tensor:
        (token_ids,) = args
        self._is_ours = (token_ids >= self._first) & (token_ids < self._last)
        return torch.where(self._is_ours, token_ids - self._first, 0)

    def _add_up(self, _: nn.Module, __: object, found: Tensor) -> Tensor:
        return self._parallel.all_reduce(found * self._is_ours[..., None])


def num_kv_heads(config: Any) -> int:
    """KV heads of a model, over all ranks."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _style_of(name: str, plan: Mapping[str, str]) -> str | None:
    for pattern, style in plan.items():
        if fnmatch.fnmatchcase(name, pattern):
            return style
    return None
