"""Pipeline stages: which layers of a model a rank keeps.

Driven by the model's own `base_model_pp_plan`, which names the parts of the backbone in order:
embeddings, layers, final norm. A stage keeps its layers and passes through the others, so that the
model's own forward runs on every stage and only its input differs:

    stage 0      input ids ->  embed  layers 0 … 1  (pass)           (pass)  -> hidden states
    stage 1  hidden states ->         (pass)        layers 2 … 3     norm    -> lm_head
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from workers.parallel import Place

# GPT-2 has no plan of its own.
_OVERRIDES: dict[str, tuple[str, ...]] = {"gpt2": ("wte", "wpe", "h", "ln_f")}


def keep_stage(model: Any, config: Any, place: Place) -> None:
    """Take the parts that belong to other stages out of a model.

    Args:
        model: transformers' causal language model, on the meta device.
        config: transformers' configuration of the model.
        place: whose stage to keep.

    Raises:
        ConfigError: the model has no plan, or fewer layers than there are stages.
    """
    if place.pp_size == 1:
        return
    names = _OVERRIDES.get(config.model_type) or tuple(config.base_model_pp_plan or ())
    if not names:
        raise ConfigError(
            f"{config.model_type} has no pipeline plan; use --pipeline-parallel-size 1"
        )
    if not place.is_last_stage:
        model.set_output_embeddings(None)
    backbone = model.base_model
    is_before_layers = True
    for name in names:
        module = getattr(backbone, name)
        if isinstance(module, nn.ModuleList):
            _keep_layers(module, stage_layers(len(module), place))
            is_before_layers = False
        elif is_before_layers and not place.is_first_stage:
            setattr(backbone, name, NoEmbedding())
        elif not is_before_layers and not place.is_last_stage:
            setattr(backbone, name, nn.Identity())


def stage_layers(num_layers: int, place: Place) -> range:
    """Return the layers of a stage. The first stages take what does not divide evenly: the last
    has the head to compute."""
    each, more = divmod(num_layers, place.pp_size)
    if each == 0:
        raise ConfigError(
            f"--pipeline-parallel-size {place.pp_size} is more than the model's {num_layers} layers"
        )
    first = place.pp_rank * each + min(place.pp_rank, more)
    return range(first, first + each + (place.pp_rank < more))


def _keep_layers(layers: nn.ModuleList, kept: range) -> None:
    for index in range(len(layers)):
        if index not in kept:
            layers[index] = PassThrough()


class PassThrough(nn.Module):
    """A layer of another stage."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states


class NoEmbedding(nn.Module):
    """An embedding of the first stage: what it added is in the hidden states already."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), device=ids.device)
