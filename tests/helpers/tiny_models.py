"""Tiny random models of every architecture we serve, as complete folders made on the spot.

    folder = tiny_model("llama", tmp_path_factory.getbasetemp())
    prompts = clear_prompts(folder, count=20, num_tokens=12)
    expected = [greedy_tokens(folder, prompt, num_tokens=12) for prompt in prompts]

Weights are float32, the same on every run, and wide enough that the best token stands out; the
vocabulary is odd, so that it divides evenly among no number of ranks. Each folder has a real
byte-level tokenizer, a chat template and generation_config.json, so that a server can be started
on it.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 389
MAX_LEN = 512
BOS, EOS = "<bos>", "<eos>"

MIN_MARGIN = 1e-3
"""The best token must lead by this much, or rounding could flip it. float32 rounds at some 1e-6."""

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(num_hidden_layers=3, tie_word_embeddings=False, **_COMMON),
    "qwen2": lambda: Qwen2Config(num_hidden_layers=2, tie_word_embeddings=True, **_COMMON),
    "qwen3": lambda: Qwen3Config(
        num_hidden_layers=3, head_dim=32, tie_word_embeddings=False, **_COMMON
    ),
    "mistral": lambda: MistralConfig(
        num_hidden_layers=2, sliding_window=12, tie_word_embeddings=False, **_COMMON
    ),
    # As in the 270M model: one KV head, several sliding layers to a full one, tied embeddings.
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON | {"num_key_value_heads": 1, "initializer_range": 0.15},
        num_hidden_layers=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
        tie_word_embeddings=True,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=MAX_LEN,
        initializer_range=0.25,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    ),
}

ARCHITECTURES = tuple(_CONFIGS)

_TEXT = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs!",
    "Sphinx of black quartz, judge my vow; how vexingly quick daft zebras jump, 1234567890 times.",
    "Größe, naïve café, Привет, 你好 and a smile \N{GRINNING FACE}: bytes are all it takes.",
]

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tiny_model(name: str, directory: Path) -> Path:
    """Return a folder with the tiny model of an architecture (one of `ARCHITECTURES`) in
    `directory`, made at the first call."""
    folder = directory / f"tiny-{name}"
    if folder.is_dir():
        return folder
    made = Path(tempfile.mkdtemp(dir=directory))
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = AutoModelForCausalLM.from_config(_CONFIGS[name](), dtype=torch.float32)
    _spread(model)
    model.generation_config.pad_token_id = 1
    model.save_pretrained(made)
    _save_tokenizer(made)
    try:
        made.rename(folder)  # at once, so that tests in parallel see all of it or nothing
    except OSError:
        assert folder.is_dir(), "somebody else made it meanwhile, or the rename failed"
    return folder


def _spread(model: Any) -> None:
    """Make biases and norms something else than zeros and ones, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        if model.config.model_type == "gemma3_text":
            # Gemma scales its embeddings up, and with tied ones would only repeat its input.
            model.get_input_embeddings().weight *= 0.2


def _save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 20,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": MAX_LEN,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def clear_prompts(folder: Path, count: int, num_tokens: int) -> list[list[int]]:
    """Return random prompts of 3 to 40 tokens, the same on every run, after which no two tokens are
    close in the running for best. Only with these can greedy tokens be compared."""
    generator = torch.Generator().manual_seed(22)
    found: list[list[int]] = []
    while len(found) < count:
        length = int(torch.randint(3, 41, (1,), generator=generator))
        prompt = torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()
        if _greedy(folder, tuple(prompt), num_tokens).margin > MIN_MARGIN:
            found.append(prompt)
    return found


def greedy_tokens(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what plain transformers generates, greedily and past any end token."""
    return _greedy(folder, tuple(prompt), num_tokens).token_ids


@functools.cache
def _plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def plain_logits(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """Return plain transformers' logits after each token of a prompt, `[len(prompt), vocab]`."""
    logits: torch.Tensor = _plain_model(folder)(torch.tensor([list(prompt)])).logits[0]
    return logits.clone()


@dataclass(frozen=True)
class _Greedy:
    token_ids: list[int]
    margin: float
    """The closest that a second best token has come."""


@functools.cache
def _greedy(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> _Greedy:
    out = _plain_model(folder).generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    return _Greedy(
        token_ids=out.sequences[0, len(prompt) :].tolist(),
        margin=float((best[:, 0] - best[:, 1]).min()),
    )
