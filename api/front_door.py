"""What happens to a request that gives engine cores work, between its head and its route: turned
away by its head alone, or begun in its turn.

    head -> full? -> 503, written at once
         -> begun: at most 32 in a turn of the event loop, the others in the next ones

Ten thousand requests may come at once. Each of the steps behind would refuse them as well, for five
times as much work; and what one turn begins, it does to the end, while probes wait. Used by
`connection`, for each request; `edge` refuses those that come another way.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from api import errors
from api.edge import id_headers, log_access, log_more_refused, request_id
from api.errors import Failure
from api.service import Service
from engine import log

_BEGUN_IN_A_TURN = 32
"""About 10 ms of work."""

_LINES_A_SECOND = 100
"""A line costs almost half of what the refusal does."""


class FrontDoor:
    """One for each API server.

    Args:
        service: of the server.
        generating: method and path of the routes that give engine cores work.
    """

    def __init__(self, service: Service, generating: Collection[tuple[str, str]]) -> None:
        self._service = service
        self._generating = frozenset(generating)
        # What browsers may read is decided further inside.
        self._may_refuse = not service.config.allowed_origins
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_begun = 0
        """In this turn."""
        self._lines = _RefusalLines()

    def is_for(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request gives engine cores work."""
        return (scope["method"], scope["path"]) in self._generating

    def refusal(self, scope: Mapping[str, Any]) -> tuple[Failure, bytes] | None:
        """The answer to such a request that cannot be taken now: what it says, with all of its
        headers, and its body. The access log has it, as it has what routes answer, unless there
        are too many."""
        service = self._service
        if not self._may_refuse or service.state != "serving":
            return None
        num_ahead = len(self._waiting) + self._num_begun
        refusal = service.admission.refusal(1, num_ahead)
        if refusal is None:
            return None
        failure, name = errors.describe(refusal), request_id(scope)
        token = log.request_id.set(name)
        body = failure.body(scope["path"])
        if service.config.access_log:
            self._lines.add(scope, failure.status)
        log.request_id.reset(token)
        headers = {**failure.headers, **id_headers(scope["path"], name)}
        return msgspec.structs.replace(failure, headers=headers), body

    def begin(self, call: Callable[[], None]) -> None:
        """Call it now, or in one of the next turns."""
        if self._num_begun >= _BEGUN_IN_A_TURN or self._waiting:
            self._waiting.append(call)
            return
        if not self._num_begun:
            asyncio.get_running_loop().call_soon(self._turn)
        self._num_begun += 1
        call()

    def _turn(self) -> None:
        self._num_begun = 0
        if not self._waiting:
            return
        asyncio.get_running_loop().call_soon(self._turn)
        while self._waiting and self._num_begun < _BEGUN_IN_A_TURN:
            self._num_begun += 1
            self._waiting.popleft()()


class _RefusalLines:
    """Lines of the access log for those who are refused: of so many in a second each has one, and
    the others are counted."""

    def __init__(self) -> None:
        self._num_refused = 0
        """In this second, which begins with the first."""

    def add(self, scope: Mapping[str, Any], status: int) -> None:
        if not self._num_refused:
            loop, no_request = asyncio.get_running_loop(), contextvars.Context()
            loop.call_later(1.0, self._end_second, context=no_request)
        self._num_refused += 1
        if self._num_refused <= _LINES_A_SECOND:
            log_access(scope, status, 0.0)

    def _end_second(self) -> None:
        if self._num_refused > _LINES_A_SECOND:
            log_more_refused(self._num_refused - _LINES_A_SECOND)
        self._num_refused = 0
