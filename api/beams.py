"""Beam search over one prompt: which continuations are followed and which are the best. Pure.

    alive beams --(the likeliest tokens behind each)--> advance --> alive beams, one token longer
                                                           \\--> ended ones

Used by `beam_search`, which asks the engine for those tokens. The search is vLLM's, step by step:
of all continuations by one token the `width` likeliest go on; one that ends is set aside and takes
no place. At the end the best `width` of all are taken, by score: the log probability divided by the
number of tokens, prompt included, to the power of the length penalty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.codec import pack_tokens
from engine.wire import FinishReason, Logprobs


@dataclass(frozen=True, slots=True)
class Step:
    """One token of a beam."""

    token_id: int
    logprob: float
    rank: int
    row: Logprobs
    """What it was chosen from: one row, whose column 0 is the engine's own choice."""


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """One continuation. Shares all but its last step with the one that it goes on from."""

    logprob: float = 0.0
    """Of all its tokens together."""
    tokens: bytes = b""
    """Packed, as they travel (`codec.pack_tokens`)."""
    last: Step | None = None
    before: "Beam | None" = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    def steps(self) -> list[Step]:
        """How it came about, token by token."""
        return [*self._backwards()][::-1]

    def _backwards(self) -> Iterator[Step]:
        beam: Beam | None = self
        while beam is not None and beam.last is not None:
            yield beam.last
            beam = beam.before


class BeamSet:
    """The beams of one prompt.

    Args:
        width: beams that are followed, and that are returned.
        max_tokens: of each.
        num_prompt_tokens: counted by the length penalty.
        length_penalty: above 0 longer beams score higher.
        eos_token_ids: the model's end tokens.
        stop_token_ids: further tokens that end a beam, named as its stop reason.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        num_prompt_tokens: int,
        length_penalty: float = 1.0,
        eos_token_ids: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self.alive = [Beam()]
        """Those that go on, likeliest first."""
        self._ended: list[Beam] = []
        self._width = width
        self._max_tokens = max_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._length_penalty = length_penalty
        self._stop_reasons = dict.fromkeys(eos_token_ids) | {i: i for i in stop_token_ids}

    def advance(self, rows: Sequence[Logprobs]) -> None:
        """Take one step.

        Args:
            rows: for each beam that is alive, the log probabilities of the token behind it, with at
                least twice `width` alternatives (or all there are).
        """
        going_on: list[Beam] = []
        for beam, row in zip(self.alive, rows, strict=True):
            for step in self._steps(row):
                self._place(beam, step, going_on)
        going_on.sort(key=lambda beam: -beam.logprob)  # stable: equals in the order of the beams
        self.alive = going_on[: self._width]
        if self.alive and self.alive[0].num_tokens == self._max_tokens:
            self.end(FinishReason.LENGTH)
        elif self._is_decided():
            self.alive = []

    def end(self, reason: FinishReason) -> None:
        """Let no beam go on."""
        self._ended += [
            Beam(each.logprob, each.tokens, each.last, each.before, reason) for each in self.alive
        ]
        self.alive = []

    def best(self) -> list[Beam]:
        """The best beams that have ended, best first."""
        return sorted(self._ended, key=self._score, reverse=True)[: self._width]

    def _steps(self, row: Logprobs) -> Iterator[Step]:
        """The tokens that a beam may go on with, likeliest first."""
        last = 1 + 2 * self._width
        token_ids, values = row.token_ids[0, 1:last].tolist(), row.logprobs[0, 1:last].tolist()
        for rank, (token_id, value) in enumerate(zip(token_ids, values, strict=True), start=1):
            yield Step(token_id, value, rank, row)

    def _place(self, beam: Beam, step: Step, going_on: list[Beam]) -> None:
        is_end = step.token_id in self._stop_reasons
        longer = Beam(
            beam.logprob + step.logprob,
            beam.tokens + pack_tokens([step.token_id]),
            step,
            beam,
            FinishReason.STOP if is_end else None,
            self._stop_reasons.get(step.token_id),
        )
        (self._ended if is_end else going_on).append(longer)

    def _is_decided(self) -> bool:
        """Whether no beam that is alive can still come among the best: it loses likelihood with
        each token, and gains by its length what it gains by the longest (or shortest) there is."""
        if len(self._ended) < self._width or not self.alive:
            return False
        worst = self._score(self.best()[-1])
        most = self.alive[0]
        lengths = (most.num_tokens, self._max_tokens)
        return all(self._score_of(most.logprob, length) <= worst for length in lengths)

    def _score(self, beam: Beam) -> float:
        # The end token is not counted, as in vLLM.
        is_end_counted = beam.finish_reason is FinishReason.STOP
        return self._score_of(beam.logprob, beam.num_tokens - is_end_counted)

    def _score_of(self, logprob: float, num_tokens: int) -> float:
        length = max(1, self._num_prompt_tokens + num_tokens)
        weight: float = length**self._length_penalty
        return logprob / weight


def joined_logprobs(beam: Beam, k: int) -> Logprobs:
    """The log probabilities of a beam's tokens, each with the best `k` at its place: as if the
    engine had sampled them one after the other."""
    steps = beam.steps()
    return Logprobs(
        token_ids=np.array(
            [[step.token_id, *step.row.token_ids[0, 1 : 1 + k]] for step in steps], "<u4"
        ).reshape(len(steps), -1),
        logprobs=np.array(
            [[step.logprob, *step.row.logprobs[0, 1 : 1 + k]] for step in steps], "<f4"
        ).reshape(len(steps), -1),
        ranks=np.array([step.rank for step in steps], "<u4"),
    )
