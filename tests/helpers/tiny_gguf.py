"""A tiny Qwen2 as a GGUF file, with some weights packed in 8 bits as such files have them."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    **{
        f"self_attn.{letter}_proj.{kind}": f"attn_{letter}.{kind}"
        for letter in "qkv"
        for kind in ("weight", "bias")
    },
}


def write_gguf(model: Path, file: Path, *, architecture: str = "qwen2") -> dict[str, np.ndarray]:
    """Write the tiny qwen2 folder `model` as a GGUF file.

    Returns:
        The weights as a reader of the file should find them, under the folder's names.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(file), architecture)
    _add_config(writer, config)
    _add_tokenizer(writer, model)
    expected = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name == "model.layers.0.mlp.up_proj.weight":
            packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            expected[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(_name(name), weight)
            expected[name] = weight
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _add_config(writer: gguf.GGUFWriter, config: dict[str, int]) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"] | special
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(vocabulary["<bos>"])
    writer.add_eos_token_id(vocabulary["<eos>"])


def _name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}"
