"""Whether a request is let in: beyond a limit it is refused at once, rather than left to wait for
longer than its client does. Pure but for the clock that it is given.

    request -> gate: full? -> body -> `place`: room for its sequences? -> tokenize -> engine core
                  503 with Retry-After, by how fast the server finishes what it has

Counted as in vLLM: sequences that wait or run, those that are being tokenized included; and, where
there is a limit, prompt tokens that wait for their prefill or are in it. Used by `edge` and
`answer`; `metrics` tells what has finished.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal, assert_never

from api.drain_rate import DrainRate, Line
from engine.errors import InvalidRequestError, OverloadedError

Reason = Literal["max_num_queued_reqs", "max_num_queued_tokens"]
"""The limit that was reached, by vLLM's name for it."""

_ROOM_AGAIN = 0.9
"""Load is shed until so much of a limit is not exceeded: at the limit itself every request that
ends would change the answer to probes."""

_WORDS: dict[Reason, str] = {
    "max_num_queued_reqs": "the server has as many requests as it takes; try again later, or"
    " another one",
    "max_num_queued_tokens": "as many prompt tokens wait as the server lets wait; try again later,"
    " or another one",
}

Clock = Callable[[], float]


class Flow:
    """What goes through one API server: prompt tokens that have yet to be computed, and how fast
    sequences and prompt tokens are done."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.num_queued_tokens = 0
        self.num_queued_prompts = 0
        self.sequences = DrainRate()
        self.prompt_tokens = DrainRate()
        self._clock = clock

    def on_sent(self, num_prompt_tokens: int) -> None:
        """A prompt goes to an engine core."""
        if not self.num_queued_tokens:
            self.prompt_tokens.begin(self._clock())
        self.num_queued_tokens += num_prompt_tokens
        self.num_queued_prompts += 1

    def on_prefilled(self, num_prompt_tokens: int) -> None:
        """It is computed, or will never be."""
        self.num_queued_tokens -= num_prompt_tokens
        self.num_queued_prompts -= 1
        self.prompt_tokens.add(self._clock(), num_prompt_tokens)

    def on_finished(self) -> None:
        """A sequence has ended, however it did."""
        self.sequences.add(self._clock())


class Admission:
    """Lets requests in, up to limits.

    Args:
        max_requests: sequences that may wait or run; None: no limit.
        max_tokens: prompt tokens that may wait; who comes when there are as many is refused,
            however short his prompt. None: no limit.
        count_sent: sequences that are with the engine cores.
        flow: of this API server.
    """

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        count_sent: Callable[[], int],
        flow: Flow,
        clock: Clock = time.monotonic,
    ) -> None:
        self.num_refused: dict[str, int] = dict.fromkeys(_WORDS, 0)
        """By reason."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._count_sent = count_sent
        self._flow = flow
        self._clock = clock
        self._num_preparing = 0
        """Sequences of requests that are let in and not sent yet."""
        self._line = Line()
        self._token_line = Line()
        self._shedding: Reason | None = None

    @property
    def num_in_flight(self) -> int:
        """Sequences that are let in and have not ended."""
        return self._num_preparing + self._count_sent()

    @property
    def shedding(self) -> Reason | None:
        """The limit for which requests are refused: from when it is reached until there is some
        room. None: there is."""
        reason = self._reason(1)
        if reason is None and self._shedding is not None:
            reason = self._without_room()
        self._shedding = reason
        return reason

    def how_full(self, reason: Reason) -> str:
        """How much of a limit is taken, for those who operate the server."""
        match reason:
            case "max_num_queued_reqs":
                return (
                    f"{self.num_in_flight} requests are in flight, of {self._max_requests}"
                    " that this API server takes (--max-num-queued-reqs)"
                )
            case "max_num_queued_tokens":
                return (
                    f"{self._flow.num_queued_tokens} prompt tokens wait, of {self._max_tokens}"
                    " that this API server lets wait (--max-num-queued-tokens)"
                )
            case other:
                assert_never(other)

    def refusal(self, num_sequences: int = 1, num_ahead: int = 0) -> OverloadedError | None:
        """Why a request of so many sequences is turned away now, if it is. Counts it.

        Args:
            num_sequences: of the request.
            num_ahead: sequences that are let in before it and count nowhere yet.
        """
        reason = self._reason(num_sequences + num_ahead)
        if reason is None:
            return None
        self._shedding = reason
        self.num_refused[reason] += 1
        return OverloadedError(_WORDS[reason], self._retry_after_s(reason, num_sequences))

    @contextlib.contextmanager
    def place(self, num_sequences: int) -> Iterator[None]:
        """Room for a request until it is sent: then its sequences count by themselves.

        Raises:
            InvalidRequestError: it is too large for ever.
            OverloadedError: it is too much now.
        """
        most = self._max_requests
        if most is not None and num_sequences > most:
            raise InvalidRequestError(
                f"these are {num_sequences} sequences; this server has {most} at a time at most"
                " (--max-num-queued-reqs)",
                "n",
            )
        if (refusal := self.refusal(num_sequences)) is not None:
            raise refusal
        if not self.num_in_flight:
            self._flow.sequences.begin(self._clock())
        self._num_preparing += num_sequences
        try:
            yield
        finally:
            self._num_preparing -= num_sequences

    def _reason(self, num_sequences: int) -> Reason | None:
        most = self._max_requests
        if most is not None and self.num_in_flight + num_sequences > most:
            return "max_num_queued_reqs"
        most = self._max_tokens
        if most is not None and self._flow.num_queued_tokens >= most:
            return "max_num_queued_tokens"
        return None

    def _without_room(self) -> Reason | None:
        """The limit of which too much is taken still to let anybody in again."""
        counts: tuple[tuple[Reason, int | None, int], ...] = (
            ("max_num_queued_reqs", self._max_requests, self.num_in_flight),
            ("max_num_queued_tokens", self._max_tokens, self._flow.num_queued_tokens),
        )
        for reason, most, count in counts:
            if most is not None and count > _ROOM_AGAIN * most:
                return reason
        return None

    def _retry_after_s(self, reason: Reason, num_sequences: int) -> int:
        now = self._clock()
        if reason == "max_num_queued_reqs":
            return self._line.join(now, num_sequences, self._flow.sequences.per_s(now))
        assert self._max_tokens is not None
        flow = self._flow
        excess = flow.num_queued_tokens - self._max_tokens + 1
        # Whoever comes back brings a prompt of unknown length: as those that wait, on average.
        mean = flow.num_queued_tokens / max(1, flow.num_queued_prompts)
        return self._token_line.join_behind(now, excess, mean, flow.prompt_tokens.per_s(now))
