"""A Llama of two layers with random weights and a tokenizer of its own: nearly nothing to compute.

    python -m tests.bench.tiny_llama FOLDER

What a server takes with it is the server's own. Heads of 32, which is the least that vLLM's
attention on CPU takes.
"""

import os
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import click

_VOCAB_SIZE = 2048
_SPECIALS = ["<s>", "</s>", "<pad>"]
_MAX_LENGTH = 8192
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_llama(cache_dir: Path) -> Path:
    """The model's folder, made at the first call, by a process that gives its memory back."""
    folder = cache_dir / "models" / "bench-tiny-llama"
    if not (folder / "config.json").exists():
        words = [sys.executable, "-m", "tests.bench.tiny_llama", str(folder)]
        subprocess.run(words, check=True, env=dict(os.environ), cwd=Path(__file__).parents[2])
    return folder


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(pydoc_data.topics.topics.values(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=_MAX_LENGTH,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=_MAX_LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
