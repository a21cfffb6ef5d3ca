"""What an engine core sends about one sequence, as text and facts for its reader. Pure.

    EngineCoreOutput -> new tokens -> detokenizer -> stop strings -> OutputDelta

Used by the HTTP routes and by `LLM`, one processor for each sequence. When things happened is kept
by `timeline`; what JSON it becomes, by the routes.
"""

from collections.abc import Sequence

import msgspec

from api import detokenizer
from api.sampling import SamplingParams
from api.stop_strings import StopMatcher
from api.tokenizer import Tokenizer
from engine.codec import unpack_tokens
from engine.errors import InvalidRequestError, RaywireError, RequestFailedError
from engine.wire import EngineCoreOutput, FinishReason, Logprobs, OutputDetails

LEAST_LOGPROB = -9999.0
"""Stands for a token that cannot be sampled: JSON knows no infinity."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token at one position."""

    token_id: int
    token: str
    """Its text by itself; U+FFFD for bytes that are no whole character."""
    bytes: bytes
    logprob: float
    """Of the raw model distribution: before penalties, bias, temperature and cuts. At least
    `LEAST_LOGPROB`."""
    rank: int
    """1 is the most likely token."""


class PositionLogprobs(msgspec.Struct, frozen=True):
    """The token at one position and the best alternatives."""

    chosen: TokenLogprob
    top: list[TokenLogprob]
    """As many as were asked for, most likely first; `chosen` may be among them."""


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new in one sequence."""

    text: str
    """May be empty although tokens came: an incomplete character or what may become a stop string
    is held back. All texts joined are the whole text."""

    token_ids: list[int]
    """Tokens that count: up to and with the one that completed a stop string, the stop token
    included."""

    logprobs: list[PositionLogprobs] | None
    """One for each of `token_ids`, if asked for."""

    prompt_logprobs: list[PositionLogprobs] | None
    """One for each prompt token after the first, if asked for; once, before or with the first
    token."""

    finish_reason: str | None
    """"stop", "length", "abort", "error" or "repetition"; set in the last delta only. Where a stop
    string ended the sequence, the engine may not know yet: close its stream."""

    stop_reason: int | str | None
    """The stop string or stop token id that ended it; None for the model's own end token."""

    failure: RaywireError | None = None
    """What failed, with the finish reason "error": the request, for a fault of its own or of
    ours."""


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Several deltas of one sequence, of which there is at least one, as if they had come at
    once."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    logprobs = [each.logprobs for each in deltas if each.logprobs is not None]
    return OutputDelta(
        text="".join(each.text for each in deltas),
        token_ids=[token_id for each in deltas for token_id in each.token_ids],
        logprobs=[position for part in logprobs for position in part] if logprobs else None,
        prompt_logprobs=next(
            (each.prompt_logprobs for each in deltas if each.prompt_logprobs is not None), None
        ),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        failure=last.failure,
    )


class OutputProcessor:
    """Follows one sequence from its first output to its last.

    Args:
        tokenizer: of the model.
        params: of the request.
        prompt_token_ids: what the output follows.
        kept_token_ids: special tokens that show in the text, whatever `params` say.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        kept_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.is_finished = False
        self.num_output_tokens = 0
        """All tokens of the sequence so far."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache."""
        self.num_prompt_tokens = len(prompt_token_ids)
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = detokenizer.start(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            kept_token_ids=kept_token_ids,
        )
        self._matcher = (
            StopMatcher(params.stop, include_match=params.include_stop_str_in_output)
            if params.stop
            else None
        )

    def push(self, output: EngineCoreOutput) -> OutputDelta | None:
        """Take in an output, which may hold several tokens.

        Returns:
            None where nothing came that a reader could use: a mere change of state, or anything
            after the end.
        """
        if self.is_finished:
            return None
        details = output.details
        if details is not None and details.prefill_stats is not None:
            self.num_cached_tokens = details.prefill_stats.num_cached_tokens
        token_ids = unpack_tokens(output.new_token_ids)
        prompt_logprobs = details.prompt_logprobs if details is not None else None
        if not token_ids and output.finish_reason is None and prompt_logprobs is None:
            return None

        text, num_used = self._read(token_ids, output)
        matched = self._matcher.matched if self._matcher is not None else None
        finish_reason = FinishReason.STOP if matched is not None else output.finish_reason
        self.is_finished = finish_reason is not None
        logprobs = details.new_logprobs if details is not None else None
        return OutputDelta(
            text=text,
            token_ids=token_ids[:num_used],
            logprobs=self._name(logprobs, num_used) if logprobs is not None else None,
            prompt_logprobs=self._name(prompt_logprobs) if prompt_logprobs is not None else None,
            finish_reason=finish_reason.word if finish_reason is not None else None,
            stop_reason=matched if matched is not None else output.stop_reason,
            failure=_failure(details) if finish_reason is FinishReason.ERROR else None,
        )

    def _read(self, token_ids: list[int], output: EngineCoreOutput) -> tuple[str, int]:
        """Return the text that may leave, and how many of the tokens count."""
        finish_reason = output.finish_reason
        is_last_shown = self._params.include_stop_str_in_output or not self._has_end(
            token_ids, output
        )
        shown = token_ids if is_last_shown else token_ids[:-1]
        if self._matcher is not None:
            return self._read_watched(self._matcher, token_ids, shown, finish_reason)
        self.num_output_tokens += len(token_ids)
        text = self._detokenizer.push(shown)
        if finish_reason is not None:
            text += self._detokenizer.finish()
        return text, len(token_ids)

    def _has_end(self, token_ids: list[int], output: EngineCoreOutput) -> bool:
        """Whether the last of the tokens is an end, rather than text. A structured output that is
        whole stops without one."""
        if output.finish_reason is not FinishReason.STOP or not token_ids:
            return False
        if self._params.structured_output is None or output.stop_reason is not None:
            return True
        return token_ids[-1] in self._tokenizer.eos_token_ids

    def _read_watched(
        self,
        matcher: StopMatcher,
        token_ids: list[int],
        shown: list[int],
        finish_reason: FinishReason | None,
    ) -> tuple[str, int]:
        """The same with stop strings: token by token, so that those after a match do not count."""
        pieces = []
        for place, token_id in enumerate(shown, start=1):
            self.num_output_tokens += 1
            may_match = self.num_output_tokens > self._params.min_tokens
            pieces.append(matcher.push(self._detokenizer.push([token_id]), may_match=may_match))
            if matcher.matched is not None:
                return "".join(pieces), place
        self.num_output_tokens += len(token_ids) - len(shown)
        if finish_reason is not None:
            pieces.append(matcher.push(self._detokenizer.finish()))
            if matcher.matched is None:
                pieces.append(matcher.finish())
        return "".join(pieces), len(token_ids)

    def _name(self, logprobs: Logprobs, num_rows: int | None = None) -> list[PositionLogprobs]:
        """Give the tokens of an array their texts."""
        return [
            self._name_position(token_ids, values, rank)
            for token_ids, values, rank in zip(
                logprobs.token_ids[:num_rows].tolist(),
                logprobs.logprobs[:num_rows].tolist(),
                logprobs.ranks[:num_rows].tolist(),
                strict=True,
            )
        ]

    def _name_position(
        self, token_ids: list[int], values: list[float], rank: int
    ) -> PositionLogprobs:
        return PositionLogprobs(
            chosen=self._name_token(token_ids[0], values[0], rank),
            top=[
                self._name_token(token_id, value, place)
                for place, (token_id, value) in enumerate(
                    zip(token_ids[1:], values[1:], strict=True), start=1
                )
            ],
        )

    def _name_token(self, token_id: int, value: float, rank: int) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        text = raw.decode("utf-8", "replace")
        return TokenLogprob(token_id, text, raw, max(value, LEAST_LOGPROB), rank)


def _failure(details: OutputDetails | None) -> RaywireError:
    """The error of a request that the engine has refused or that has failed there."""
    if details is None or details.error is None:
        return RequestFailedError("the engine failed on this request")
    if details.error_code is None:
        return RequestFailedError(details.error)
    refusal = InvalidRequestError(details.error, details.error_param)
    refusal.code = details.error_code or None
    return refusal
