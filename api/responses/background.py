"""Responses that run without a connection: `background: true`.

A run outlives the request that began it. Its events are kept, if it is streamed, so a client that
has lost its connection reads on where it was: event n is the one with sequence number n. A run ends
with its generation, by `cancel`, or with the server.
"""

import asyncio
from collections.abc import Iterable, Sequence

from api import errors
from api.errors import Failure
from api.generate import Generation
from api.limits import MAX_BACKGROUND_RUNS
from api.responses.form import Keep, ResponseFormat
from engine.errors import RaywireError, UnavailableError


class History:
    """The events of a stream so far, for as many readers as like.

    Args:
        events: those that there are.
        is_over: no more will come.
    """

    def __init__(self, events: Sequence[bytes] = (), *, is_over: bool = False) -> None:
        self.events = list(events)
        self.is_over = is_over
        self._news = asyncio.Event()

    def add(self, events: Iterable[bytes]) -> None:
        self.events += events
        self.wake()

    def end(self) -> None:
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        """Let everybody look again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait(self) -> None:
        """Until the next call of `wake`."""
        await self._news.wait()


class HistoryReader:
    """Events from anywhere on: a `sse.EventSource`.

    Args:
        history: of the stream.
        num_seen: of its events, which the client has.
    """

    def __init__(self, history: History, num_seen: int) -> None:
        self._history = history
        self._num_seen = num_seen
        self._is_gone = False

    def leave(self) -> None:
        """The client has gone."""
        self._is_gone = True
        self._history.wake()

    @property
    def is_over(self) -> bool:
        return self._is_gone or (self._history.is_over and not self._has_news)

    @property
    def _has_news(self) -> bool:
        return len(self._history.events) > self._num_seen

    async def next(self) -> bytes:
        while not (self._has_news or self.is_over):
            await self._history.wait()
        news = self._history.events[self._num_seen :]
        self._num_seen += len(news)
        return b"".join(news)

    def failed(self, failure: Failure) -> bytes:
        raise AssertionError("a run tells of its failure itself")


class Run:
    """One response on its way.

    Args:
        form: makes the response.
        generation: launched; the run closes it.
        keep: takes the response when it has ended.
    """

    def __init__(self, form: ResponseFormat, generation: Generation, keep: Keep) -> None:
        self.form = form
        self.history = History()
        self._generation = generation
        self._keep = keep
        form.begin()
        self._publish()

    async def follow(self) -> None:
        """Follow the generation to its end."""
        form, generation = self.form, self._generation
        try:
            while not generation.is_over:
                form.push(await generation.news())
                self._publish()
            if not form.is_over:
                form.finish()
        except RaywireError as error:
            form.fail(errors.describe(error))
        finally:
            if not form.is_over:
                form.fail(errors.internal_failure())
            generation.close()
            self._end()

    def cancel(self) -> None:
        """End it now. What there is of it stays."""
        if not self.form.is_over:
            self.form.cancel()
            self._generation.cancel()
            self._end()

    def _end(self) -> None:
        if not self.history.is_over:
            self._publish()
            self.history.end()
            self._keep(self.form.stored(self.history.events))

    def _publish(self) -> None:
        if self.form.log is not None:
            self.history.add(self.form.log.take())


class Runs:
    """Those of one API server."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def check_room(self) -> None:
        """Raise UnavailableError if no more can begin."""
        if len(self) >= MAX_BACKGROUND_RUNS:
            raise UnavailableError(
                f"{MAX_BACKGROUND_RUNS} responses run in the background already", 5
            )

    def get(self, response_id: str) -> Run | None:
        """The run, unless it is over."""
        run = self._runs.get(response_id)
        return None if run is None or run.form.is_over else run

    def start(self, run: Run) -> None:
        """Let it run."""
        self._runs[run.form.id] = run
        task = asyncio.create_task(run.follow(), name=run.form.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._runs.pop(run.form.id, None))
