"""What happens to a request that gives engine cores work, between its head and its route: turned
away by its head alone, or begun in its turn.

    head -> full? -> 503, written at once
         -> begun: at most 32 in a turn of the event loop, the others in the next ones

Ten thousand requests may come at once. Each of the steps behind would refuse them as well, for five
times as much work; and what one turn begins, it does to the end, while probes wait. Used by
`connection`, for each request; `edge` refuses those that come another way.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from api import errors
from api.edge import request_id
from api.errors import Failure
from api.service import Service
from engine import log

_BEGUN_IN_A_TURN = 32
"""About 10 ms of work."""


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

    def is_for(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request gives engine cores work."""
        return (scope["method"], scope["path"]) in self._generating

    def refusal(self, scope: Mapping[str, Any]) -> tuple[Failure, bytes] | None:
        """The answer to such a request that cannot be taken now: what it says, with all of its
        headers, and its body."""
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
        log.request_id.reset(token)
        failure = msgspec.structs.replace(
            failure, headers={**failure.headers, "x-request-id": name}
        )
        return failure, body

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
