"""ZeroMQ client of one or more engine cores, on asyncio. One per API server, and one in `LLM`.

Binds the ROUTER and the PULL of wire 1 (`engine/wire.py`), hands each request's outputs to its
`RequestStream`, and answers UTILITY calls. It decides nothing about text or HTTP. `engine_wire`
reads and writes messages; `engine_registry` knows which engine cores are up, `dispatcher` which
requests they have.

When an engine core is gone, `engine_deaths` says what follows; whoever watches its process tells us
(`mark_dead`, `lose`), and so does the wire.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from api import tenant
from api.dispatcher import Dispatcher
from api.engine_deaths import EngineDeaths
from api.engine_handle import EngineHandle
from api.engine_registry import HEARTBEAT_TIMEOUT_S, EngineRegistry
from api.engine_start import EngineStart
from api.engine_wire import EngineWire
from api.load_balancer import LoadBalancer, Route
from api.load_feed import LoadFeed
from api.request_stream import RequestStream, Wakeup
from api.timeline import Timeline
from api.utility_calls import UtilityCalls
from engine.bound import ServerWires
from engine.config import CoordinatorAddresses
from engine.doorkeeper import Doorkeeper
from engine.errors import ConfigError, EngineDeadError, RaywireError, UnavailableError
from engine.wire import (
    CoordinatorType,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineLoad,
    EngineReady,
    Fingerprint,
    Heartbeat,
    RequestType,
    SchedulerStats,
    pack_identity,
)

_UNREACHABLE_GRACE_S = 1.0
"""A lost connection is noticed before the exit code is: whoever watches the process gets this long
to name the cause."""


class EngineClient:
    """The API server's side of wire 1. All methods but `bind`, `follow`, `allow`, `expect`, `lose`
    and `mark_dead`, and before `wait_ready` also `introduce`, belong to the loop's thread.

    Args:
        num_engines: engine cores of this server.
        client_index: which API server this is.
        heartbeat_timeout_s: silence after which an engine core counts as hung.
        step_timeout_s: the executors' own limit of a step (`ExecutorConfig.execute_timeout_s`).
        first_rank: data-parallel rank of the first engine core; see `ApiConfig`.
        replaces_ranks: once it serves, the death of an engine core is a loss that it outlives;
            somebody starts a new one.
    """

    def __init__(
        self,
        num_engines: int = 1,
        client_index: int = 0,
        *,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        step_timeout_s: float = 300.0,
        first_rank: int = 0,
        replaces_ranks: bool = False,
    ) -> None:
        self._registry = EngineRegistry(
            num_engines, heartbeat_timeout_s, step_timeout_s, first_rank
        )
        self.engines = self._registry.engines
        self.balancer = LoadBalancer(num_engines, client_index)
        self.ready_at = 0.0
        """When all engine cores had said READY, on the monotonic clock."""
        self.on_stats: Callable[[int, SchedulerStats], None] | None = None
        """Called with each engine core's statistics as they come."""
        self.on_load: Callable[[int, EngineLoad], None] | None = None
        """Called with what the coordinator says of each engine core."""
        self.on_ready: Callable[[EngineReady], None] | None = None
        """Called for each READY that is news, on the event loop."""
        self._doorkeeper = Doorkeeper()
        self._client_index = client_index
        self._watch_interval_s = min(1.0, heartbeat_timeout_s / 4)
        self._checked_at = 0.0
        self._dispatcher = Dispatcher(self.engines, self.balancer, self._send, replaces_ranks)
        self._calls = UtilityCalls(
            client_index, lambda index, call: self._send(index, RequestType.UTILITY, call)
        )
        self._wire = EngineWire(
            take_ready=self._take_ready,
            take_outputs=self._take_outputs,
            take_heartbeat=self._take_heartbeat,
            take_dead=self._take_dead,
        )
        self._sockets = self._wire.sockets
        self._start = EngineStart(self._registry, self._wire)
        self.deaths = EngineDeaths(
            self._registry,
            self.balancer,
            self._dispatcher,
            self._calls,
            self._wire,
            take_load=self._tell_load,
            wake_start=self._start.changed.set,
            replaces_ranks=replaces_ranks,
        )
        """What follows when an engine core is gone."""
        self._registry.on_stale = self._on_stale
        self._feed: LoadFeed | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------- start and stop

    def bind(self, wires: ServerWires) -> None:
        """Make the ZeroMQ context and bind; encrypted if there are keys. From any thread, before
        `wait_ready`; after engines were forked, if they are forked."""
        with self._lock:
            if self._is_closed:  # the start was cut short
                wires.close()
            else:
                self._sockets.bind(wires, self._doorkeeper)

    def follow(self, coordinator: CoordinatorAddresses) -> None:
        """Hear from the coordinator what other API servers have sent. From any thread, after `bind`
        and before `wait_ready`."""
        with self._lock:
            if self._is_closed:  # the start was cut short
                return
            self._feed = LoadFeed(self._on_load)
            self._sockets.subscribe(
                coordinator.publish,
                CoordinatorType.LOADS.value,
                coordinator.public_key,
                self._on_report,
            )

    def allow(self, public_keys: Iterable[bytes]) -> None:
        """Admit the engine cores with these keys, before they connect. From any thread. Nobody is
        asked for keys on ipc."""
        self._doorkeeper.allow(public_keys)

    def expect(self, fingerprint: Fingerprint) -> None:
        """Refuse engine cores that are not like this. From any thread, before they start."""
        self._registry.expected = fingerprint

    def introduce(self, ready: Iterable[EngineReady], epochs: Mapping[int, int]) -> None:
        """Know engine cores that serve others already. From any thread, before `wait_ready`.

        Args:
            ready: these have said READY, and will not say it again.
            epochs: of these, by index, all incarnations before have been lost.
        """
        self._start.introduced = list(ready)
        self.deaths.is_serving = True
        for index, epoch in epochs.items():
            self._registry.give_up(index, epoch - 1)

    async def wait_ready(self, timeout_s: float, waited_s: float = 0.0) -> list[EngineReady]:
        """Wait until all engine cores have said READY, and the coordinator has heard it as well;
        what they said, by rank.

        Args:
            timeout_s: how long it may take.
            waited_s: how much of that is over.

        Raises:
            ConfigError: an engine core differs from the others, or from what is expected; the
                difference is spelled out.
            EngineDeadError: one has died, or they were not ready in time.
        """
        self._attach()
        try:
            async with asyncio.timeout(max(0.0, timeout_s - waited_s)):
                while missing := self._start.missing(self._feed):
                    self.deaths.raise_if_dead()
                    await self._start.wait_for_change()
        except TimeoutError:
            cause = self._start.why_late(missing, timeout_s)
            self.deaths.declare(missing[0].index, cause, is_first=True)
        self.deaths.raise_if_dead()
        self.ready_at = time.monotonic()
        self.deaths.is_serving = True
        return [engine.ready for engine in self.engines if engine.ready is not None]

    async def wait_dead(self) -> None:
        """Wait for a death. After `wait_ready`, or it may come from a thread that wakes nobody."""
        while self.death is None:
            await self.deaths.dying.wait()

    def close(self) -> None:
        """Fail what is pending and close the sockets. Idempotent; deaths are no news after it."""
        with self._lock:  # `mark_dead` from another thread must not meet a half-closed client
            self._loop, self._is_closed = None, True
            self.deaths.close()
        if self._watch is not None:
            self._watch.cancel()
        if self._sockets.is_bound:
            self.deaths.fail_all(UnavailableError("the server is shutting down"))
            self._sockets.close()

    def _attach(self) -> None:
        """Watch the sockets from the running event loop."""
        if self._loop is not None:
            return
        loop = asyncio.get_running_loop()
        with self._lock:
            self._loop = loop
        self._sockets.watch(loop)
        self._checked_at = loop.time()
        for ready in self._start.introduced or ():
            self._take_ready(pack_identity(ready.engine_index, ready.epoch), ready)
        self._watch = loop.call_later(self._watch_interval_s, self._check_heartbeats)

    # ------------------------------------------------------------------------------- state

    @property
    def death(self) -> EngineDeadError | None:
        """The first cause, once an engine core is gone for good."""
        return self.deaths.death

    @property
    def step_limit_s(self) -> float:
        """A step that takes longer has hung."""
        return self._registry.step_limit_s

    @property
    def num_stale_messages(self) -> int:
        """Messages of incarnations that have been replaced, dropped."""
        return self._registry.num_stale_messages

    @property
    def num_bad_messages(self) -> int:
        """Messages that broke the protocol, dropped."""
        return self._sockets.bad_messages.count

    @property
    def num_refused_connections(self) -> int:
        """Of strangers to the encrypted wires."""
        return self._doorkeeper.num_refused

    @property
    def heeds_stop(self) -> bool:
        """Whether all engine cores would act on a stop: they have loaded, and none hangs. One that
        is lost has no part in it."""
        return all(
            e.state == "lost" or (e.ready is not None and e.state != "hung") for e in self.engines
        )

    @property
    def num_up(self) -> int:
        """Engine cores that can take requests."""
        return sum(engine.state == "up" for engine in self.engines)

    @property
    def num_in_flight(self) -> int:
        """Requests without a last output so far."""
        return len(self._dispatcher)

    @property
    def num_pending_calls(self) -> int:
        """UTILITY calls without an answer so far."""
        return self._calls.num_pending

    # ------------------------------------------------------------------------------- calls

    def stream(
        self,
        request: EngineCoreRequest,
        *,
        wakeup: Wakeup | None = None,
        timeline: Timeline | None = None,
        session: str | None = None,
        follows: Route | None = None,
    ) -> RequestStream:
        """Send a request and return the stream of its outputs. Closing that early aborts it.

        Args:
            request: its id must be unique; `data_parallel_rank` None leaves the choice to the load
                balancer.
            wakeup: set whenever an output comes, for readers of several streams.
            timeline: takes in the request's times.
            session: the client's name for requests that belong together: they share a rank, if that
                costs nothing.
            follows: where another request of the same prompt has gone: this one goes there too.

        Raises:
            EngineDeadError: an engine core is gone, and is not replaced.
            InvalidRequestError: there is no such rank, or the request is too large for a wire.
            UnavailableError: it is not up, or none is.
        """
        self.deaths.raise_if_dead()
        if (salt := tenant.salted(request.cache_salt)) != request.cache_salt:
            request = msgspec.structs.replace(request, cache_salt=salt)
        if request.client_index != self._client_index:
            request = msgspec.structs.replace(request, client_index=self._client_index)
        return self._dispatcher.dispatch(request, wakeup, timeline, session, follows)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests; their streams end with no further output. Unknown ids are ignored."""
        self._dispatcher.abort(request_ids)

    def fail_all(self, error: RaywireError) -> None:
        """Abort everything; readers get `error`."""
        self._dispatcher.abort_all(error)

    async def utility(
        self,
        method: str,
        *args: object,
        engine_index: int | None = None,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """Run a method of the allow-list (`engine.utility`) on one engine core, or on all.

        Returns:
            One result per engine core asked, of the method's type.

        Raises:
            EngineDeadError: an engine core is gone, before or while it worked.
            WireError: no such method, or arguments that it does not take.
            RequestFailedError: the method failed; the message says why.
            UnavailableError: no answer in time, or an engine core is being replaced.
        """
        self.deaths.raise_if_dead()
        if engine_index is not None:
            indices = [engine_index]
        else:
            indices = [each.index for each in self.engines if each.state != "lost"]
        results = await self._calls.call(indices, method, args, timeout_s)
        if method == "reset_prefix_cache":
            for index, is_reset in zip(indices, results, strict=True):
                if is_reset:
                    self.balancer.forget_prefixes(index)
        return results

    def _send(self, index: int, kind: RequestType, message: object) -> None:
        engine = self.engines[index]
        if engine.identity is None:
            raise UnavailableError("no engine core is ready")
        if not self._wire.send(engine.identity, kind, message):
            raise self._on_unreachable(engine)

    # ---------------------------------------------------------------------------- incoming

    def _take_ready(self, identity: bytes, ready: EngineReady) -> None:
        if self.deaths.are_outlived:
            # A successor may be heard of before the loss is: the streams would stay with the lost.
            self._lose_earlier(ready)
        try:
            is_news = self._registry.take_ready(identity, ready, self._now())
        except ConfigError as difference:
            engine = self.engines[ready.engine_index]
            self.deaths.refuse(engine, ready.epoch, difference, self._now())
            return
        if is_news:
            cache_tokens = ready.kv_cache_size_tokens if ready.has_prefix_cache else 0
            self.balancer.mark_up(ready.engine_index, ready.block_size, cache_tokens)
            self._start.changed.set()
            self._dispatcher.settle()
            if self.on_ready is not None:
                self.on_ready(ready)

    def _lose_earlier(self, ready: EngineReady) -> None:
        if ready.engine_index < len(self.engines):
            known = self.engines[ready.engine_index].ready
            if known is not None and known.epoch < ready.epoch:
                self.deaths.lose(known.engine_index, known.epoch, "another has taken its place")

    def _on_stale(self, engine_index: int, epoch: int) -> None:
        self.deaths.fence(engine_index, epoch, self._now())

    def _take_heartbeat(self, heartbeat: Heartbeat) -> None:
        self._registry.take_heartbeat(heartbeat, self._now())

    def _take_outputs(self, outputs: EngineCoreOutputs) -> None:
        engine = self._registry.sender(outputs.engine_index, outputs.epoch)
        if engine is None or engine.ready is None:  # READY travels on another socket
            return
        engine.last_seen = self._now()
        self._dispatcher.take(engine, outputs)
        if outputs.stats is not None:
            self.balancer.take_report(engine.index, outputs.stats)
            self.balancer.take_counters(engine.index, outputs.stats)
            if self.on_stats is not None:
                self.on_stats(engine.index, outputs.stats)
        if outputs.utility is not None:
            self._calls.take(outputs.utility)

    def _on_report(self, frames: list[bytes]) -> None:
        assert self._feed is not None
        self._feed.take(frames, self._now())
        self._start.changed.set()

    def _on_load(self, load: EngineLoad) -> None:
        engine = self._registry.sender(load.engine_index, load.epoch)
        if engine is not None and engine.ready is not None:
            self.balancer.take_report(engine.index, load)
            self._tell_load(load)

    def _tell_load(self, load: EngineLoad) -> None:
        if self.on_load is not None:
            self.on_load(load.engine_index, load)

    def _take_dead(self, dead: EngineDead) -> None:
        if self._registry.take_last_words(dead):
            engine = self.engines[dead.engine_index]
            self.deaths.take(engine, dead.cause, is_first=not dead.is_told)

    # ----------------------------------------------------------------------- life and death

    def lose(self, engine_index: int, epoch: int, cause: str) -> None:
        """Say that an incarnation of an engine core is gone, or has been given up: its requests go
        on elsewhere. From any thread; once it is known, there is no effect."""
        with self._lock:
            loop = self._loop
        if loop is None or _is_current(loop):
            self.deaths.lose(engine_index, epoch, cause)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so do we
                loop.call_soon_threadsafe(self.deaths.lose, engine_index, epoch, cause)

    def mark_dead(self, engine_index: int | None, cause: str) -> None:
        """Say that an engine core is gone, or (None) another process that the server cannot live
        without. From any thread; only the first call has an effect."""
        with self._lock:
            loop = self._loop
            if loop is not None and not _is_current(loop):
                loop.call_soon_threadsafe(self.deaths.declare, engine_index, cause)
                return
        self.deaths.declare(engine_index, cause)

    def _on_unreachable(self, engine: EngineHandle) -> EngineDeadError:
        cause = "its connection is gone"
        if self._loop is not None:
            self._loop.call_later(
                _UNREACHABLE_GRACE_S, self._on_gone_since, engine, engine.epoch, cause
            )
        return EngineDeadError(engine.rank, cause)

    def _on_gone_since(self, engine: EngineHandle, epoch: int, cause: str) -> None:
        if engine.epoch == epoch:  # else its successor is expected already
            self.deaths.take(engine, cause, is_first=True)

    def _check_heartbeats(self) -> None:
        loop = self._loop
        if loop is None:
            return
        self._sockets.read_all()
        if self._now() - self._checked_at > 3 * self._watch_interval_s:
            # This process was stopped or starved itself: whatever is silent gets a new chance.
            self._registry.give_new_chance(self._now())
            if self._feed is not None:
                self._feed.give_new_chance(self._now())
        if self._feed is not None:
            self._feed.check_silence(self._now())
        self._checked_at = self._now()
        self._watch = loop.call_later(self._watch_interval_s, self._check_heartbeats)
        for engine in self.engines:
            if (cause := self._registry.why_hung(engine, self._now())) and self.death is None:
                engine.state = "hung"
                self.deaths.take(engine, cause, is_first=True)

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()


def _is_current(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the caller runs on `loop`."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
