"""The sizes of a model, from its config.json alone: no torch, no transformers.

So that what contradicts them (a tensor-parallel size that does not divide the heads, a length that
the model does not have) is refused before any process starts, and `raywire plan` can tell what a
model needs. The workers check again, with transformers' own reading (`tensor_parallel`,
`engine/kv_sizing`). A key that is not in the file has transformers' default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import DType
from engine.errors import ConfigError

_GPT2_NAMES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}

DEFAULTS: dict[str, dict[str, int | None]] = {
    "gemma3_text": {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_size": 768,
        "intermediate_size": None,
        "vocab_size": 50257,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "llama": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}
"""transformers' own, by `model_type`; a test compares. None: follows from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of the text model, over all ranks."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_len: int
    """The longest position the model was made for."""

    is_tied: bool
    """Whether head and embedding are one weight."""

    dtype: DType
    """What `--dtype auto` means for it."""

    def check_split(self, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
        """Raise ConfigError unless the model divides among so many ranks."""
        ranks = tensor_parallel_size
        self._check_divides(self.num_heads, ranks, "attention heads")
        if self.num_kv_heads >= ranks:
            self._check_divides(self.num_kv_heads, ranks, "KV heads")
        elif ranks % self.num_kv_heads:
            raise ConfigError(
                f"--tensor-parallel-size {ranks} is no multiple of the model's"
                f" {self.num_kv_heads} KV heads, which its ranks would share"
            )
        self._check_divides(self.intermediate_size, ranks, "features between MLP layers")
        if pipeline_parallel_size > self.num_layers:
            raise ConfigError(
                f"--pipeline-parallel-size {pipeline_parallel_size} is more than the model's"
                f" {self.num_layers} layers"
            )

    def _check_divides(self, total: int, ranks: int, what: str) -> None:
        if total % ranks:
            raise ConfigError(
                f"--tensor-parallel-size {ranks} does not divide the model's {total} {what}"
            )


def check_options(
    config: Mapping[str, Any],
    *,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    max_model_len: int | None,
) -> None:
    """Raise ConfigError where a config.json shows that the model cannot be served like this.

    Args:
        config: config.json, of the scripted model too.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: stages.
        max_model_len: as asked; None where the model's own will be taken, or what fits.
    """
    max_len: object = config.get("max_position_embeddings")
    if (shape := read_shape(config)) is not None:
        shape.check_split(tensor_parallel_size, pipeline_parallel_size)
        max_len = shape.max_len
    if max_model_len is not None and isinstance(max_len, int) and max_model_len > max_len >= 1:
        raise ConfigError(
            f"--max-model-len {max_model_len} must be from 1 to {max_len}, the model's own maximum"
        )


def read_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The sizes in a config.json; None where it has something else than sizes in their places, or
    its architecture is none that we know: what transformers makes of that, the workers will say."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        return None
    model_type = text.get("model_type", "gemma3_text" if text is not config else None)
    defaults = DEFAULTS.get(model_type) if isinstance(model_type, str) else None
    if defaults is None:
        return None
    names = _GPT2_NAMES if model_type == "gpt2" else {}
    sizes = {
        key: text.get(names.get(key, key), text.get(key, default))
        for key, default in defaults.items()
    }
    is_tied = sizes.pop("tie_word_embeddings")
    if not all(value is None or _is_size(value) for value in sizes.values()):
        return None
    return _shape(sizes, bool(is_tied), _dtype(text, config))


def _shape(sizes: Mapping[str, Any], is_tied: bool, dtype: DType) -> ModelShape | None:
    required = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    if any(sizes[key] is None for key in (*required, "max_position_embeddings")):
        return None
    num_heads, hidden_size = sizes["num_attention_heads"], sizes["hidden_size"]
    return ModelShape(
        num_layers=sizes["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=sizes["num_key_value_heads"] or num_heads,
        head_dim=sizes["head_dim"] or hidden_size // num_heads,
        hidden_size=hidden_size,
        intermediate_size=sizes["intermediate_size"] or 4 * hidden_size,
        vocab_size=sizes["vocab_size"],
        max_len=sizes["max_position_embeddings"],
        is_tied=is_tied,
        dtype=dtype,
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _dtype(*configs: Mapping[str, Any]) -> DType:
    """float32 where none says otherwise, as the workers have it."""
    for config in configs:
        match config.get("dtype", config.get("torch_dtype")):
            case "bfloat16":
                return "bfloat16"
            case "float16":
                return "float16"
    return "float32"
