"""Log probabilities in the shapes of the two routes. Pure; used by `routes`."""

from collections.abc import Iterable, Sequence

from api import detokenizer
from api.answer_bodies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from api.answer_bodies import TokenLogprob as ChatTokenLogprob
from api.generate import Prompt
from api.output_processor import PositionLogprobs, TokenLogprob
from api.sampling import SamplingParams
from api.tokenizer import Tokenizer


def for_chat(positions: Iterable[PositionLogprobs], *, has_token_ids: bool = False) -> ChatLogprobs:
    """The chat route's shape.

    Args:
        positions: of an answer.
        has_token_ids: a token is written as its id; its bytes are there all the same.
    """
    return ChatLogprobs([_chat_token(position, has_token_ids) for position in positions])


def _chat_token(position: PositionLogprobs, has_token_ids: bool) -> ChatTokenLogprob:
    chosen = position.chosen
    top = [TopLogprob(_name(t, has_token_ids), t.logprob, list(t.bytes)) for t in position.top]
    return ChatTokenLogprob(_name(chosen, has_token_ids), chosen.logprob, list(chosen.bytes), top)


def _name(token: TokenLogprob, has_token_ids: bool) -> str:
    """How a token is written. Only its id tells apart those that are parts of a character."""
    return _id_name(token.token_id) if has_token_ids else token.token


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def for_prompt(positions: Iterable[PositionLogprobs]) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: by token id, and none for the first token."""
    entries = [{t.token_id: _prompt_token(t) for t in (p.chosen, *p.top)} for p in positions]
    return [None, *entries]


def _prompt_token(token: TokenLogprob) -> PromptLogprob:
    return PromptLogprob(token.logprob, token.rank, token.token)


class CompletionLogprobsWriter:
    """The legacy shape of one choice. Text offsets go on from one call to the next, so the arrays
    of a stream's chunks, joined, are those of the whole answer.

    An offset is where a token's text begins in the answer's text: so a token that the text leaves
    out (the begin token, or the space that is cut at the start of a text) moves it not at all, and
    the bytes of an incomplete character once it is complete.

    Args:
        tokenizer: of the model.
        params: what the client asked for.
        prompt: which the answer may echo.
        has_token_ids: a token is written as its id; offsets are those of its text all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Prompt,
        *,
        has_token_ids: bool = False,
    ) -> None:
        self._num_chars = 0
        self._has_token_ids = has_token_ids
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._output = detokenizer.start(
            tokenizer,
            prompt.token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    def add(self, shape: CompletionLogprobs, positions: Iterable[PositionLogprobs]) -> None:
        """Append tokens of the output with their log probabilities."""
        for position in positions:
            self._append(shape, position)
            self._num_chars += len(self._output.push([position.chosen.token_id]))

    def add_prompt(self, shape: CompletionLogprobs, positions: Sequence[PositionLogprobs]) -> None:
        """Append the echoed prompt. Nothing comes before its first token, which so has no
        probability."""
        text, token_ids = self._prompt.text, self._prompt.token_ids
        echoed = detokenizer.start(self._tokenizer)
        for token_id, position in zip(token_ids, [None, *positions], strict=False):
            if position is None:
                name = self._tokenizer.token_text(token_id)
                shape.tokens.append(_id_name(token_id) if self._has_token_ids else name)
                shape.text_offset.append(self._num_chars)
                shape.token_logprobs.append(None)
                shape.top_logprobs.append(None)
            else:
                self._append(shape, position)
            token = self._tokenizer.token_text(token_id)
            is_written_out = token_id in self._tokenizer.special_token_ids and text.startswith(
                token, self._num_chars
            )
            self._num_chars += len(token if is_written_out else echoed.push([token_id]))

    def _append(self, shape: CompletionLogprobs, position: PositionLogprobs) -> None:
        chosen = position.chosen
        shape.tokens.append(_name(chosen, self._has_token_ids))
        shape.text_offset.append(self._num_chars)
        shape.token_logprobs.append(chosen.logprob)
        shape.top_logprobs.append(
            {_name(t, self._has_token_ids): t.logprob for t in (chosen, *position.top)}
        )
