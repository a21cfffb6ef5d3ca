"""Log probabilities in the shapes of the two routes. Pure; used by `routes`."""

import codecs
from collections.abc import Iterable, Sequence

from api.output_processor import PositionLogprobs, TokenLogprob
from api.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from api.protocol import TokenLogprob as ChatTokenLogprob
from api.tokenizer import Tokenizer


def for_chat(positions: Iterable[PositionLogprobs]) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(position) for position in positions])


def _chat_token(position: PositionLogprobs) -> ChatTokenLogprob:
    chosen = position.chosen
    top = [TopLogprob(t.token, t.logprob, list(t.bytes)) for t in position.top]
    return ChatTokenLogprob(chosen.token, chosen.logprob, list(chosen.bytes), top)


def for_prompt(positions: Iterable[PositionLogprobs]) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: by token id, and none for the first token."""
    entries = [{t.token_id: _prompt_token(t) for t in (p.chosen, *p.top)} for p in positions]
    return [None, *entries]


def _prompt_token(token: TokenLogprob) -> PromptLogprob:
    return PromptLogprob(token.logprob, token.rank, token.token)


class CompletionLogprobsWriter:
    """The legacy shape of one choice. Text offsets go on from one call to the next, so the arrays
    of a stream's chunks, joined, are those of the whole answer."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, positions: Iterable[PositionLogprobs]) -> CompletionLogprobs:
        shape = CompletionLogprobs([], [], [], [])
        self.add(shape, positions)
        return shape

    def add(self, shape: CompletionLogprobs, positions: Iterable[PositionLogprobs]) -> None:
        """Append tokens with their log probabilities."""
        for position in positions:
            chosen = position.chosen
            self._append(shape, chosen.token, chosen.bytes)
            shape.token_logprobs.append(chosen.logprob)
            shape.top_logprobs.append({t.token: t.logprob for t in (chosen, *position.top)})

    def add_prompt(
        self,
        shape: CompletionLogprobs,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs],
    ) -> None:
        """Append an echoed prompt. Nothing comes before its first token, which so has no
        probability."""
        self._append(shape, tokenizer.token_text(token_ids[0]), tokenizer.token_bytes(token_ids[0]))
        shape.token_logprobs.append(None)
        shape.top_logprobs.append(None)
        self.add(shape, positions)

    def _append(self, shape: CompletionLogprobs, token: str, token_bytes: bytes) -> None:
        shape.tokens.append(token)
        shape.text_offset.append(self._num_chars)
        # Bytes of an incomplete character move the offset once it is complete.
        self._num_chars += len(self._decoder.decode(token_bytes))
