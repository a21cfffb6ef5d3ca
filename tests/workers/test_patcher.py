"""Replaced modules compute what transformers' did; whatever is not understood stays as it is."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

import api
from cluster.model_source import resolve
from engine.config import ModelConfig
from engine.sampling_params import SamplingParams
from tests.helpers.built_kernels import backend, cache_dir
from tests.helpers.plan_driver import PlanDriver, Sequence
from tests.helpers.tiny_models import ARCHITECTURES, clear_prompts, plain_logits, tiny_model
from tests.helpers.worker_settings import loaded_worker, worker_config
from workers import loader, patcher
from workers.linear import PackedEmbedding, PackedLinear
from workers.parallel import Parallel, Place

CPU = torch.device("cpu")
FUSED = {"llama": 3, "qwen2": 2, "mistral": 2, "gemma3": 4, "gpt2": 0, "qwen3": 3}
"""Layers whose MLP and attention are known by their parts. Heads of 16 do not fill the vectors of
the rotary kernel: llama's, qwen2's and mistral's tiny models keep their attention."""
SMALL_HEADS = ("llama", "qwen2", "mistral")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def loaded(folder: Path) -> Any:
    alone = Parallel(Place(0, 1, 0, 1), "", CPU, timeout_s=1.0)
    settings = ModelConfig(path=str(folder), model_type="any", dtype="bfloat16")
    return loader.load(settings, alone, CPU, 1).model


def kinds(model: nn.Module) -> dict[str, int]:
    return {
        kind.__name__: sum(isinstance(module, kind) for module in model.modules())
        for kind in (patcher.GatedMLP, patcher.FusedAttention, patcher.FusedLayer, PackedEmbedding)
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_known_parts_are_replaced(architecture: str, models: Path) -> None:
    """MLPs, attention and whole layers, without any architecture's name; no linear layer stays
    unpacked."""
    model = loaded(tiny_model(architecture, models))
    patcher.patch(model, backend())

    found, layers = kinds(model), FUSED[architecture]
    assert found["GatedMLP"] == layers
    of_attention = 0 if architecture in SMALL_HEADS else layers
    assert (found["FusedAttention"], found["FusedLayer"]) == (of_attention, of_attention)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert found["PackedEmbedding"] == bool(model.config.tie_word_embeddings)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_as_close_to_float32_as_before(architecture: str, models: Path) -> None:
    """Log probabilities of prompts: the mean distance from transformers in float32 is what plain
    bfloat16 has, or less. Prefilled in chunks and decoded together."""
    folder = tiny_model(architecture, models)
    prompts = clear_prompts(folder, 8, 4)
    exact = [plain_logits(folder, prompt).log_softmax(-1) for prompt in prompts]

    ours, plain = (
        distance(prompt_logprobs(folder, prompts, kernels), prompts, exact)
        for kernels in (cache_dir(), None)
    )

    assert ours <= 1.15 * plain  # a few hundred tokens: some scatter either way


@pytest.mark.slow
def test_the_demo_model_is_as_close_to_float32_as_before() -> None:
    """Gemma 3 270M on text: no further from transformers in float32 than transformers in
    bfloat16."""
    folder = resolve("demo", cache_dir=Path(cache_dir()))
    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    prompts = [encode(text).ids for text in TEXTS]
    exact, plain = (
        [hub_logprobs(folder, prompt, dtype) for prompt in prompts]
        for dtype in (torch.float32, torch.bfloat16)
    )

    ours = distance(prompt_logprobs(folder, prompts, cache_dir()), prompts, exact)

    assert ours <= mean_distance(own(plain, prompts), own(exact, prompts))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma3", "qwen3", "gpt2"])
def test_parts_of_tensor_ranks_are_replaced_too(
    architecture: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with half of the heads and features each, and their collectives in between: as
    close to float32 as one rank."""
    monkeypatch.setenv("RAYWIRE_CACHE_DIR", cache_dir())
    folder = tiny_model(architecture, models)
    prompts = clear_prompts(folder, 8, 4)
    exact = own([plain_logits(folder, prompt).log_softmax(-1) for prompt in prompts], prompts)
    params = api.SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=2, ignore_eos=True)

    distances = []
    for num_ranks in (1, 2):
        with api.LLM(str(folder), dtype="bfloat16", tensor_parallel_size=num_ranks) as llm:
            outputs = llm.generate(list(prompts), params, use_tqdm=False)
        found = [
            next(iter(logprobs.values())).logprob
            for output in outputs
            for logprobs in output.prompt_logprobs or []
            if logprobs
        ]
        distances.append(mean_distance(torch.tensor(found), exact))

    assert distances[1] <= 1.25 * distances[0]


TEXTS = [
    "The capital of France is Paris, a city on the Seine that has been the seat of its kings.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n"
    "    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Once upon a time, there was a little girl who lived in a village near the forest. One day her"
    " mother asked her to bring a basket of bread to her grandmother.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. It takes place in"
    " the chloroplasts of green plants, in algae and in some bacteria.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610",
    "Im Anfang war das Wort, und das Wort war bei Gott, und Gott war das Wort.",
]


@torch.inference_mode()
def hub_logprobs(folder: Path, prompt: list[int], dtype: torch.dtype) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    logits: Tensor = model(torch.tensor([prompt])).logits[0]
    return logits.float().log_softmax(-1)


def own(logprobs: list[Tensor], prompts: list[list[int]]) -> Tensor:
    """Of each prompt's own tokens after the first."""
    rows = zip(logprobs, prompts, strict=True)
    return torch.cat([row[range(len(p) - 1), p[1:]] for row, p in rows])


def mean_distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().mean())


def prompt_logprobs(
    folder: Path, prompts: list[list[int]], kernel_cache_dir: str | None
) -> list[Sequence]:
    config = worker_config(folder, dtype="bfloat16", kernel_cache_dir=kernel_cache_dir)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    sequences = [Sequence(str(i), p, 3, params) for i, p in enumerate(prompts)]
    PlanDriver(loaded_worker(config).execute_model).run(sequences, chunk=7)
    return sequences


def distance(sequences: list[Sequence], prompts: list[list[int]], exact: list[Tensor]) -> float:
    """Mean absolute difference of the prompts' own tokens' log probabilities."""
    found = [part.logprobs[:, 0] for s in sequences for part in s.prompt_logprobs]
    return mean_distance(torch.from_numpy(np.concatenate(found)), own(exact, prompts))


class LooksLikeAnMLP(nn.Module):
    """The right parts, put together in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
        self.up_proj = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
        self.down_proj = nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)
        self.act_fn = silu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))  # type: ignore[no-any-return]


class OddRMSNorm(nn.Module):
    """Scaled by half as much as any that we know."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (
            x * torch.rsqrt(x.float().square().mean(-1, keepdim=True)).to(x.dtype) * self.weight / 2
        )


class Model(nn.Module):
    """Only as much of a model as the patcher asks for."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def get_output_embeddings(self) -> None:
        return None

    def get_input_embeddings(self) -> None:
        return None


@pytest.mark.parametrize("part", [LooksLikeAnMLP, OddRMSNorm])
def test_what_computes_something_else_is_left_alone(
    part: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log, and the same results as before."""
    model = Model(part().requires_grad_(False))
    x = torch.randn(9, 32).to(torch.bfloat16)
    expected = model.part(x)

    with caplog.at_level(logging.INFO):
        patcher.patch(model, backend())

    assert type(model.part) is part
    assert sum("left alone" in record.message for record in caplog.records) == 1
    assert patcher.agree(model.part(x), expected)


def test_a_tied_weight_is_there_once(models: Path) -> None:
    """Head and embedding read the same memory, which is where it was loaded."""
    model = loaded(tiny_model("gemma3", models))
    patcher.patch(model, backend())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, PackedLinear)
    assert embedding._head[0] is head
    assert not dict(model.named_parameters()).keys() & {"lm_head.weight"}


def test_agreement_is_judged_by_column() -> None:
    """A small column that is wrong is not hidden by a large one."""
    theirs = torch.randn(16, 4) * torch.tensor([1000.0, 1.0, 1.0, 1.0])
    wrong = theirs.clone()
    wrong[:, 2] *= 1.5
    assert patcher.agree(theirs * (1 + 2**-9), theirs)
    assert not patcher.agree(wrong, theirs)
