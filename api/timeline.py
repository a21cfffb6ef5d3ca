"""When things happened to one request, by the engine core's own clock. Pure.

Fed by `request_stream` with each output, read by `metrics`. The definitions, for a request that may
be preempted any number of times:

    QUEUED    SCHEDULED     first token      PREEMPTED   SCHEDULED         last token
      |  queue   |   prefill    |    decode     |  queue     |    decode       |
      +----------+--------------+---------------+------------+-----------------+

queue: all waiting, before the first step and after each preemption. prefill: running time up to the
first token. decode: running time after it, which includes recomputing what a preemption threw away.
The three add up to the time from QUEUED to the last token. All of them are differences of stamps of
one clock, so neither a slow API server nor a second machine's clock can bend them. Where a request
goes on at another engine core, the pause in between is in none of them.
"""

from engine.wire import EngineCoreOutput, EventKind


class Timeline:
    """Adds up the times of one request."""

    __slots__ = (
        "_decode_s",
        "_is_waiting",
        "_mark",
        "engine_index",
        "first_token_at",
        "last_token_at",
        "num_preemptions",
        "prefill_s",
        "queue_s",
        "was_scheduled",
    )

    def __init__(self) -> None:
        self.engine_index = 0
        """Which engine core has the request; set by `engine_client` when it sends it."""
        self.queue_s = 0.0
        self.prefill_s = 0.0
        self._decode_s = 0.0
        """Up to the last event; see `decode_s`."""
        self.num_preemptions = 0
        self.was_scheduled = False
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._is_waiting = True
        self._mark: float | None = None
        """Where the interval under way began."""

    @property
    def decode_s(self) -> float:
        """Up to the last token, or to a preemption after it."""
        if self._is_waiting or self._mark is None or self.last_token_at is None:
            return self._decode_s
        return self._decode_s + max(0.0, self.last_token_at - self._mark)

    def update(self, output: EngineCoreOutput, timestamp: float) -> None:
        """Take in one output of the step that ended at `timestamp`."""
        if output.details is not None and output.details.events:
            for event in output.details.events:
                self._on_event(event.kind, event.timestamp)
        if output.new_token_ids:
            if self.first_token_at is None:
                self._on_first_token(timestamp)
            self.last_token_at = timestamp

    def leave(self) -> None:
        """Its engine core is gone. What comes next is stamped by another clock; what passes until
        then is on neither and counts nowhere."""
        self._decode_s = self.decode_s
        self._is_waiting = True
        self._mark = None
        self.last_token_at = None

    def _on_event(self, kind: EventKind, timestamp: float) -> None:
        self._advance(timestamp)
        if kind is EventKind.SCHEDULED:
            self._is_waiting = False
            self.was_scheduled = True
        else:
            self._is_waiting = True
            self.num_preemptions += kind is EventKind.PREEMPTED

    def _on_first_token(self, timestamp: float) -> None:
        # Steps overlap: a request may be preempted after the step that its token comes from began,
        # so the token's stamp ends an interval only while the request runs.
        if not self._is_waiting:
            self._advance(timestamp)
        self.first_token_at = timestamp

    def _advance(self, timestamp: float) -> None:
        """End the interval under way at `timestamp` and book it."""
        if self._mark is not None:
            passed_s = max(0.0, timestamp - self._mark)
            if self._is_waiting:
                self.queue_s += passed_s
            elif self.first_token_at is None:
                self.prefill_s += passed_s
            else:
                self._decode_s += passed_s
        self._mark = timestamp if self._mark is None else max(self._mark, timestamp)
