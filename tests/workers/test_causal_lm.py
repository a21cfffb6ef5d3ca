"""Logits are what the model's own code computes from states, whatever it does around its head."""

from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GraniteConfig

from workers.attention.reference import ReferenceAttention
from workers.causal_lm import CausalLM
from workers.loader import LoadedModel
from workers.parallel import Parallel, Place

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PLAIN = Gemma3TextConfig(head_dim=16, **COMMON)
CAPPED = Gemma3TextConfig(head_dim=16, final_logit_softcapping=0.5, **COMMON)
SCALED = GraniteConfig(logits_scaling=3.0, **COMMON)
STATES = torch.randn(5, 32, generator=torch.Generator().manual_seed(9))


def model_of(config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(10)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def causal_lm(model: Any) -> CausalLM:
    alone = Parallel(Place(0, 1, 0, 1), "", CPU, timeout_s=1.0)
    loaded = LoadedModel(model, model.config, torch.float32, 0)
    return CausalLM(loaded, alone, ReferenceAttention(), CPU)


@torch.inference_mode()
def logits(model: CausalLM) -> Tensor:
    found = model.logits(STATES)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "around"),
    [
        (PLAIN, lambda x: x),
        (CAPPED, lambda x: 0.5 * torch.tanh(x / 0.5)),
        (SCALED, lambda x: x / 3),
    ],
    ids=["plain", "capped", "scaled"],
)
def test_what_a_model_does_around_its_head_is_done(config: Any, around: Any) -> None:
    """Logits that are capped or scaled stay so."""
    model = model_of(config)
    head = STATES @ model.lm_head.weight.T
    torch.testing.assert_close(logits(causal_lm(model)), around(head))


def test_a_head_that_is_all_there_is_is_called_by_itself() -> None:
    """None of transformers' code runs around it."""
    model = model_of(PLAIN)
    ours = causal_lm(model)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the model's forward was called")

    model.forward = refuse
    assert logits(ours).shape == (5, 50)
