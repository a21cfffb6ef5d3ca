"""What a scripted model is told: its config.json, and the script in it. No torch.

Read by `scripted`, which runs the script, and by `cluster.scripted_source`, which checks a script
before anything starts.

A folder with this config.json is a scripted model; beside it goes any tokenizer:

    {
      "model_type": "scripted",
      "architectures": ["ScriptedModel"],
      "vocab_size": 260,
      "max_position_embeddings": 32768,
      "eos_token_id": 257,
      "script": {"kind": "echo"}
    }

| script | output token i is |
|---|---|
| `{"kind": "tokens", "token_ids": [5, 6]}` | token_ids[i], then the end token |
| `{"kind": "echo"}` | the prompt's token i, then the end token: requests bring their scripts |
| `{"kind": "cycle", "token_ids": [5, 6]}` | token_ids[i mod length], for ever |

Beside `kind`, a script may have:

| field | default | meaning |
|---|---|---|
| `step_delay_s` | 0.0 | each step takes that much longer |
| `token_delay_s` | 0.0 | and that much for each of its tokens |
| `raise_at_step` | null | step number k of a rank raises an error; the first is 1 |
| `raise_on_rank` | null | which rank does; null: the one that replies |
"""

from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import ConfigError

MAX_DELAY_S = 3600.0


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`script` in config.json."""

    kind: Literal["tokens", "echo", "cycle"] = "echo"
    token_ids: list[int] = []
    step_delay_s: float = 0.0
    token_delay_s: float = 0.0
    raise_at_step: int | None = None
    raise_on_rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind != "echo" and not self.token_ids:
            raise ValueError(f"a script of kind {self.kind!r} needs token_ids")
        for name in ("step_delay_s", "token_delay_s"):
            if not 0 <= getattr(self, name) <= MAX_DELAY_S:
                raise ValueError(f"script.{name} must be from 0 to {MAX_DELAY_S:.0f} seconds")


class ScriptedConfig(msgspec.Struct, frozen=True):
    """config.json of a scripted model, as far as it matters here."""

    vocab_size: int
    max_position_embeddings: int = 32768
    eos_token_id: int | list[int] | None = None
    script: Script = Script()

    def __post_init__(self) -> None:
        for name, most in (("vocab_size", 1 << 20), ("max_position_embeddings", 1 << 24)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from 1 to {most}, not {getattr(self, name)}")
        for name, token_ids in (
            ("script.token_ids", self.script.token_ids),
            ("eos_token_id", [self.end_token_id]),
        ):
            if unknown := [t for t in token_ids if not 0 <= t < self.vocab_size]:
                raise ValueError(f"{name} has {unknown[0]}; vocab_size is {self.vocab_size}")

    @property
    def end_token_id(self) -> int:
        """What follows when the script is over; without one in the config, the last token id."""
        match self.eos_token_id:
            case int(token_id) | [int(token_id), *_]:
                return token_id
            case _:
                return self.vocab_size - 1


def read_config(folder: Path) -> ScriptedConfig:
    """Read config.json of a scripted model.

    Raises:
        ConfigError: a field has the wrong type or value, or the script a field that we don't know.
    """
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=ScriptedConfig)
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"cannot use {folder / 'config.json'}: {error}") from error
