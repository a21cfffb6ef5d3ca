"""Cutting a prompt that may be too long, because its client would rather lose a part of it than the
answer (`truncate_prompt_tokens`). Pure; used by `input_processor`."""

from dataclasses import dataclass
from typing import Literal

from engine.errors import InvalidRequestError

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """What is to be left of a prompt."""

    max_tokens: int
    """At most so many tokens; -1: as many as the model takes beside the answer."""

    side: Side = "left"
    """The side that is cut off."""

    def limit(self, max_model_len: int, num_output_tokens: int) -> int:
        """Tokens to keep.

        Args:
            max_model_len: longest prompt plus output.
            num_output_tokens: room that -1 leaves for the answer; at most half the model's length.

        Raises:
            InvalidRequestError: the wish is out of bounds.
        """
        if self.max_tokens == -1:
            return max_model_len - min(num_output_tokens, max_model_len // 2)
        if not 1 <= self.max_tokens <= max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be from 1 to {max_model_len}, or -1 for as many as"
                f" this model takes, not {str(self.max_tokens)[:40]}",
                "truncate_prompt_tokens",
            )
        return self.max_tokens

    def cut_text(self, text: str, max_chars: int) -> str:
        """A text without what cannot be left of it, so that nobody makes tokens of that."""
        if len(text) <= max_chars:
            return text
        return text[-max_chars:] if self.side == "left" else text[:max_chars]

    def cut(self, token_ids: list[int], limit: int, num_kept: int = 0) -> list[int]:
        """At most `limit` tokens.

        Args:
            token_ids: of the prompt.
            limit: from `limit`.
            num_kept: the first so many stay on either side: the begin token.
        """
        if len(token_ids) <= limit:
            return token_ids
        if self.side == "right":
            return token_ids[:limit]
        num_kept = min(num_kept, limit)
        return token_ids[:num_kept] + token_ids[len(token_ids) - (limit - num_kept) :]
