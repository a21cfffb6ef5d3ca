"""The calls that workers have not answered yet: which ranks are to reply, by when, to which future.

State only: no ring, thread or clock inside. The executor adds calls on the engine core's thread and
hands in replies on its own, hence the lock.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestFailedError, WireError
from workers import rpc


@dataclass(slots=True)
class PendingCall:
    """One call under way."""

    number: int
    """Its sequence in the broadcast ring."""
    label: str
    method: str
    timeout_s: float
    is_single: bool
    """The future's result is the one reply's result, rather than a list by rank."""
    missing: set[int]
    """Ranks that have not replied."""
    results: dict[int, Any] = field(default_factory=dict)
    refusal: str | None = None
    sent_s: float = math.inf
    """When it was written to the ring, on the executor's clock. Until then no worker is late."""
    future: "Future[Any]" = field(default_factory=Future)

    def resolve(self) -> None:
        if self.refusal is not None:
            self.future.set_exception(RequestFailedError(f"{self.label}: {self.refusal}"))
        elif self.is_single:
            (result,) = self.results.values()
            self.future.set_result(result)
        else:
            self.future.set_result([self.results[rank] for rank in sorted(self.results)])


class PendingCalls:
    """Calls in the order in which they were made. Their futures are resolved in that order too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: OrderedDict[int, PendingCall] = OrderedDict()
        self._error: Exception | None = None

    def add(
        self, call: rpc.Call, number: int, ranks: Sequence[int], timeout_s: float
    ) -> PendingCall:
        """Note a call that is about to be made. After a failure, its future has failed already."""
        pending = PendingCall(
            number=number,
            label=rpc.label(call),
            method=rpc.method(call),
            timeout_s=timeout_s,
            is_single=call.output_rank is not None,
            missing=set(ranks),
        )
        pending.future.set_running_or_notify_cancel()  # the workers' work cannot be taken back
        with self._lock:
            if self._error is None:
                self._calls[number] = pending
                return pending
        pending.future.set_exception(self._error)
        return pending

    def accept(self, rank: int, reply: rpc.Reply) -> None:
        """Take a reply, and resolve what is now complete.

        Raises:
            WireError: nobody waits for it.
        """
        assert not isinstance(reply, rpc.Failed)
        with self._lock:
            pending = self._calls.get(reply.call)
            if pending is None or rank not in pending.missing:
                raise WireError(f"rank {rank} replies to call {reply.call}, which it was not asked")
            if isinstance(reply, rpc.Refused):
                pending.refusal = pending.refusal or reply.result
            elif rpc.method(reply) != pending.method:
                raise WireError(f"rank {rank} replies to {pending.label} as {rpc.method(reply)}")
            pending.missing.discard(rank)
            pending.results[rank] = reply.result
            complete = self._take_complete()
        for call in complete:  # outside the lock: resolving runs other people's callbacks
            call.resolve()

    def fail(self, error: Exception) -> None:
        """Fail all calls under way, and all to come."""
        with self._lock:
            self._error = self._error or error
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            call.future.set_exception(error)

    def oldest(self) -> PendingCall | None:
        """The call that the workers should be at."""
        with self._lock:
            return next(iter(self._calls.values()), None)

    def _take_complete(self) -> list[PendingCall]:
        complete = []
        while self._calls:
            number, call = next(iter(self._calls.items()))
            if call.missing:
                break
            complete.append(self._calls.pop(number))
        return complete
