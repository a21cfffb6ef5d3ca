"""transformers' causal language model on flat batches, in two halves: backbone and head.

The backbone turns tokens into hidden states, with the attention of `attention/` over our paged
cache. The head turns only those states into logits that somebody wants. Both are the model's own
code, so that whatever it does around them (scaled embeddings, capped logits) is done; where it does
nothing around the head, that is called by itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from engine.step import KVCacheSpec
from workers import kv_cache
from workers.attention.base import AttentionBackend
from workers.cuda_graphs import CudaGraphs
from workers.forward_context import ForwardContext, forward_context
from workers.input_batch import InputBatch, Step
from workers.kv_cache import KVShape, LayerKV
from workers.loader import LoadedModel
from workers.parallel import Parallel
from workers.pipeline_parallel import stage_layers
from workers.tensor_parallel import num_kv_heads


class CausalLM:
    """This rank's part of a model. Implements `model_runner.Model`.

    Args:
        loaded: its modules and weights.
        parallel: the groups of this rank.
        backend: of attention.
        device: of the weights.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        parallel: Parallel,
        backend: AttentionBackend,
        device: torch.device,
    ) -> None:
        config, place = loaded.config, parallel.place
        self.vocab_size = int(config.vocab_size)
        self.layers = stage_layers(config.num_hidden_layers, place)
        self.kv_shape = KVShape(
            num_kv_heads=max(1, num_kv_heads(config) // place.tp_size),
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            dtype=loaded.dtype,
        )
        self._hidden_size = int(config.hidden_size)
        self._dtype = loaded.dtype
        self._device = device
        self._parallel = parallel
        self._is_output = place.is_output
        self._backend = backend
        self._backbone: nn.Module = loaded.model.base_model
        self._head = _head_of(loaded.model, self._hidden_size, loaded.dtype, device)
        self._kv_cache: dict[int, LayerKV] = {}
        self.graphs = CudaGraphs(self._states)

    def allocate_kv_cache(self, spec: KVCacheSpec) -> None:
        self.graphs.clear()
        self._kv_cache.clear()
        self._kv_cache = kv_cache.allocate(
            self.kv_shape, self.layers, spec.num_blocks, spec.block_size, self._device
        )

    def forward(self, step: Step, batch: InputBatch) -> Tensor | None:
        """Run the layers of this stage. Returns `[num_tokens, hidden_size]` on the last one; the
        others pass it on."""
        place, received = self._parallel.place, None
        if not place.is_first_stage:
            shape = (step.num_tokens, self._hidden_size)
            received = self._parallel.receive(shape, self._dtype, self._device)
        hidden = self.graphs.run(step, received)
        if place.is_last_stage:
            return hidden
        # What is on its way must stay, and the states of a replay last until the next.
        self._parallel.send(hidden.clone() if step.lies_in_place else hidden)
        return None

    def _states(self, step: Step, received: Tensor | None) -> Tensor:
        """What `forward` does between receiving and sending."""
        if received is None:
            inputs = {"input_ids": step.input_ids[None]}
        else:
            inputs = {"inputs_embeds": received[None]}
        self._backend.prepare(step.layout)
        with forward_context(ForwardContext(step.layout, self._kv_cache, self._backend)):
            output = self._backbone(**inputs, position_ids=step.positions[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, states: Tensor) -> Tensor | None:
        """Return `[len(states), vocab_size]` float32 on the first tensor rank. All of them must
        call."""
        logits = self._head(states)
        return logits.float() if self._is_output else None


Head = Callable[[Tensor], Tensor]
"""States `[n, hidden_size]` to logits `[n, vocab_size]`."""


@torch.inference_mode()
def _head_of(model: Any, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Head:
    """Return what a model computes from its backbone's states, which is taken out of it. The head
    alone, if random states tell no difference: transformers' code around it takes half a
    millisecond."""
    head: nn.Module | None = model.get_output_embeddings()
    setattr(model, model.base_model_prefix, _GivenStates())

    def whole(states: Tensor) -> Tensor:
        logits: Tensor = model(inputs_embeds=states[None], use_cache=False).logits[0]
        return logits

    if head is None:  # the last stage's
        return whole
    random = torch.Generator().manual_seed(8)
    states = torch.randn(4, hidden_size, generator=random).to(device, dtype)
    # On all tensor ranks: the head may end with a collective.
    return head if torch.equal(head(states), whole(states)) else whole


class _GivenStates(nn.Module):
    """Stands where the backbone was, and returns the states that were computed before."""

    def forward(
        self, *_: object, inputs_embeds: Tensor, **__: object
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)
