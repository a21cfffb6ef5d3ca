"""Whether the event loops of several API servers still turn, and whether newcomers get so far.
Pure; used by `api_servers`.

One that hangs would keep its share of the connections to the port, and nobody outside could tell:
a liveness probe that reaches another one says that all is well. So the command asks each once a
second, but not again before it has answered, or what it says would pile up and hold it.
"""

INTERVAL_S = 1.0

SILENCE_S = 10.0
"""As of engine cores (`api.engine_registry`): one that does not answer for so long has hung."""

_LATE_S = 3.0
"""Who looks this late was stopped or starved itself, and cannot tell."""


class Pulse:
    """Times are of any one clock that does not jump."""

    def __init__(self) -> None:
        self._answered_at: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}
        """Of those that have not answered."""
        self._due_by: dict[int, float] = {}
        """When those that load have to serve."""
        self._looked_at: float | None = None

    def expect(self, index: int, by: float) -> None:
        """An API server has been started in the place of another, and has to serve by then."""
        self._due_by[index] = by

    def take(self, index: int, now: float) -> None:
        """An API server has answered; the first time, it has begun to serve."""
        self._answered_at[index] = now
        self._due_by.pop(index, None)
        self._asked_at.pop(index, None)

    def forget(self, index: int) -> None:
        """It is gone; another may have its index later."""
        self._answered_at.pop(index, None)
        self._due_by.pop(index, None)
        self._asked_at.pop(index, None)

    def due(self, now: float) -> list[int]:
        """Whom to ask now. They count as asked."""
        due = [
            index
            for index, answered_at in self._answered_at.items()
            if index not in self._asked_at and now - answered_at >= INTERVAL_S
        ]
        self._asked_at.update(dict.fromkeys(due, now))
        return due

    def hung(self, now: float) -> int | None:
        """An API server that has hung, if there is one. To be called all the time."""
        if self._looked_at is not None and now - self._looked_at > _LATE_S:
            self._asked_at = dict.fromkeys(self._asked_at, now)
        self._looked_at = now
        silent = (i for i, asked_at in self._asked_at.items() if now - asked_at > SILENCE_S)
        return next(silent, None)

    def late(self, now: float) -> int | None:
        """An API server that should serve by now and does not, if there is one."""
        return next((index for index, by in self._due_by.items() if now > by), None)
