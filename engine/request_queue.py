"""Requests that wait to run: first come, first served, or by priority. Used by the scheduler.

Both give out the request with the lowest sort key first. Adding, taking and removing cost at most a
logarithm, so ten thousand waiting requests can be aborted at once without stopping the engine.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from engine.config import Policy
from engine.request import Request


class RequestQueue(Protocol):
    """Holds each request at most once."""

    def add(self, request: Request) -> None: ...

    def put_back(self, request: Request) -> None:
        """Add a preempted request, before all that came after it."""

    def peek(self) -> Request:
        """The next one. Only call it when the queue is not empty."""

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""


def make_queue(policy: Policy) -> RequestQueue:
    return FCFSQueue() if policy == "fcfs" else PriorityQueue()


class FCFSQueue:
    """First come, first served."""

    def __init__(self) -> None:
        # Ordered by hand rather than by sort key: a deque could not remove from its middle.
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        # The newest is preempted first, so putting each at the front keeps them in order.
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityQueue:
    """Lowest (priority, arrival time) first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], Request]] = []
        self._waiting: set[Request] = set()

    def add(self, request: Request) -> None:
        # Sort keys end with a number of their own, so requests are never compared.
        heapq.heappush(self._heap, (request.sort_key, request))
        self._waiting.add(request)

    put_back = add

    def peek(self) -> Request:
        self._drop_removed()
        return self._heap[0][1]

    def pop(self) -> Request:
        self._drop_removed()
        request = heapq.heappop(self._heap)[1]
        self._waiting.remove(request)
        return request

    def remove(self, request: Request) -> None:
        # Its entry stays in the heap until it comes up, or until half of the heap is such entries.
        self._waiting.remove(request)
        if len(self._heap) > 2 * len(self._waiting):
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)

    def _drop_removed(self) -> None:
        while self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)
