"""UTILITY calls that wait for an answer: the small RPC of wire 1 (`engine/utility.py`). Part of
`engine_client`, on its event loop."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from engine import utility
from engine.errors import EngineDeadError, RaywireError, UnavailableError
from engine.wire import UtilityCall, UtilityOutput


class UtilityCalls:
    """The calls of one API server.

    Args:
        client_index: which API server this is.
        send: sends a call to the engine core of that index.
    """

    def __init__(self, client_index: int, send: Callable[[int, UtilityCall], None]) -> None:
        self._client_index = client_index
        self._send = send
        self._pending: dict[int, tuple[int, asyncio.Future[UtilityOutput]]] = {}
        """By call id: whom it was sent to, and what waits for the answer."""
        self._next_call_id = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    async def call(
        self, indices: Sequence[int], method: str, args: Sequence[object], timeout_s: float
    ) -> list[Any]:
        """Run a method of the allow-list on each of these engine cores.

        Returns:
            One result for each, of the method's type.

        Raises:
            EngineDeadError: an engine core is gone, before or while it worked.
            WireError: no such method, or arguments that it does not take.
            RequestFailedError: the method failed; the message says why.
            UnavailableError: no answer in time, or an engine core is being replaced.
        """
        call_ids: list[int] = []
        unreachable: RaywireError | None = None
        try:
            for index in indices:
                call_ids.append(self._next_call_id)
                try:
                    self._start(index, method, args)
                except EngineDeadError as error:  # the others are asked all the same
                    unreachable = unreachable or error
            if unreachable is not None:
                raise unreachable
            futures = [self._pending[call_id][1] for call_id in call_ids]
            async with asyncio.timeout(timeout_s):
                answers = await asyncio.gather(*futures)
        except TimeoutError as error:
            raise UnavailableError(f"{method}: no answer within {timeout_s:.0f} s") from error
        finally:
            for call_id in call_ids:
                self._pending.pop(call_id, None)
        return [utility.read_answer(method, answer) for answer in answers]

    def take(self, answer: UtilityOutput) -> None:
        """An answer has come; nobody may wait for it any more."""
        _, future = self._pending.get(answer.call_id, (None, None))
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: RaywireError, engine_index: int | None = None) -> None:
        """No answer will come from that engine core; None: from none."""
        for index, future in self._pending.values():
            if engine_index in (None, index) and not future.done():
                future.set_exception(error)

    def _start(self, engine_index: int, method: str, args: Sequence[object]) -> None:
        call_id = self._next_call_id
        self._next_call_id += 1
        self._send(
            engine_index, utility.make_call(self._client_index, call_id, method, tuple(args))
        )
        self._pending[call_id] = (engine_index, asyncio.get_running_loop().create_future())
