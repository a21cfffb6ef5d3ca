"""ZeroMQ client of one or more engine cores, on asyncio. One per API server, and one in `LLM`.

Binds the ROUTER and the PULL of wire 1 (`engine/wire.py`), hands each request's outputs to its
`RequestStream`, and knows which engine cores are up: they say READY, send heartbeats, and say DEAD;
whoever watches their processes calls `mark_dead`. It decides nothing about text or HTTP.

A core that hangs is a dead core: one whose heartbeats stop, or whose step takes longer than any
step may, is treated like one that has exited. In the default mode the death of one ends the service
of all: every pending and every later call raises EngineDeadError.

The sockets are plain ones, read when the event loop says that their descriptor has changed: a third
to a half of what `zmq.asyncio` costs per message (7 and 23 us in bursts, on uvloop).
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from api.engine_handle import EngineHandle
from api.load_balancer import choose
from api.request_stream import RequestStream, Wakeup
from api.timeline import Timeline
from engine import utility
from engine.codec import Decoder, Encoder
from engine.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    RaywireError,
    UnavailableError,
    WireError,
)
from engine.fingerprint import differences
from engine.sockets import make_socket
from engine.wire import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineReady,
    Heartbeat,
    OutputType,
    RequestType,
    SchedulerStats,
    UtilityOutput,
    unpack_identity,
)

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 10.0
"""Silence of an engine core after which it counts as hung: ten heartbeats."""

STEP_MARGIN_S = 10.0
"""A step that is older than its timeout by this much has hung: the executor, which knows the guilty
worker, had its chance to name it."""

_UNREACHABLE_GRACE_S = 1.0
"""A lost connection is noticed before the exit code is: whoever watches the process gets this long
to name the cause."""
_DRAIN_AT_ONCE = 64
"""Messages read before other tasks get their turn."""


@dataclass(frozen=True, slots=True)
class ClientAddresses:
    """Where one API server binds. Chosen by `cluster/addresses.py`."""

    request: str
    """ROUTER: requests out, READY in."""

    output: str
    """PULL: outputs, heartbeats and last words in."""


class EngineClient:
    """The API server's side of wire 1. All methods but `mark_dead` belong to the loop's thread.

    Args:
        addresses: where to bind.
        num_engines: data-parallel size.
        client_index: which API server this is.
        heartbeat_timeout_s: silence after which an engine core counts as hung.
        step_timeout_s: the executors' own limit of a step (`ExecutorConfig.execute_timeout_s`).
    """

    def __init__(
        self,
        addresses: ClientAddresses,
        num_engines: int = 1,
        client_index: int = 0,
        *,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        step_timeout_s: float = 300.0,
    ) -> None:
        self.engines = [EngineHandle(index) for index in range(num_engines)]
        self.step_limit_s = step_timeout_s + STEP_MARGIN_S
        """A step that takes longer has hung."""
        self.death: EngineDeadError | None = None
        """The first cause, once an engine core is gone for good."""
        self.num_stale_messages = 0
        """Messages of incarnations that have been replaced, dropped."""
        self.num_bad_messages = 0
        """Messages that broke the protocol, dropped."""
        self.on_stats: Callable[[int, SchedulerStats], None] | None = None
        """Called with each engine core's statistics as they come."""
        self.on_death: Callable[[EngineDeadError], None] | None = None
        """Called once, on the event loop, after all calls have been failed."""
        self._addresses = addresses
        self._client_index = client_index
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._watch_interval_s = min(1.0, heartbeat_timeout_s / 4)
        self._checked_at = 0.0
        self._streams: dict[str, tuple[RequestStream, EngineHandle]] = {}
        self._calls: dict[int, asyncio.Future[UtilityOutput]] = {}
        self._next_call_id = 0
        self._refusal: ConfigError | None = None
        self._starting: Wakeup = Wakeup()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._encoder = Encoder()
        self._decode_ready = Decoder[EngineReady](EngineReady).decode
        self._decode_outputs = Decoder[EngineCoreOutputs](EngineCoreOutputs).decode
        self._decode_heartbeat = Decoder[Heartbeat](Heartbeat).decode
        self._decode_dead = Decoder[EngineDead](EngineDead).decode

    # ------------------------------------------------------------------------- start and stop

    def bind(self) -> None:
        """Make the ZeroMQ context and bind. After engines were forked, if they are forked."""
        self._context = zmq.Context(io_threads=1)
        self._router = make_socket(self._context, zmq.ROUTER)
        self._pull = make_socket(self._context, zmq.PULL)
        self._router.bind(self._addresses.request)
        self._pull.bind(self._addresses.output)

    async def wait_ready(self, timeout_s: float) -> list[EngineReady]:
        """Wait until all engine cores have said READY; what they said, by rank.

        Raises:
            ConfigError: an engine core differs from the others; the difference is spelled out.
            EngineDeadError: one has died, or they were not ready in time.
        """
        self._attach()
        try:
            async with asyncio.timeout(timeout_s):
                while missing := [engine for engine in self.engines if engine.ready is None]:
                    self._raise_if_dead()
                    await self._starting.wait()
        except TimeoutError:
            names = ", ".join(f"engine core {e.index} ({e.describe()})" for e in missing)
            cause = f"no READY within {timeout_s:.0f} s from {names}"
            self._declare_dead(missing[0].index, cause, is_first=True)
        self._raise_if_dead()
        return [engine.ready for engine in self.engines if engine.ready is not None]

    def close(self) -> None:
        """Fail what is pending and close the sockets. Idempotent; deaths are no news after it."""
        with self._lock:  # `mark_dead` from another thread must not meet a half-closed client
            loop, self._loop, self._is_closed = self._loop, None, True
        if self._watch is not None:
            self._watch.cancel()
        if self._context is None:
            return
        if loop is not None:
            for socket in (self._router, self._pull):
                loop.remove_reader(_descriptor(socket))
        self._fail_all(UnavailableError("the server is shutting down"))
        for socket in (self._router, self._pull):
            socket.close(linger=0)
        self._context.term()
        self._context = None

    def _attach(self) -> None:
        """Watch the sockets from the running event loop."""
        if self._loop is not None:
            return
        if self._context is None:
            self.bind()
        loop = asyncio.get_running_loop()
        with self._lock:
            self._loop = loop
        loop.add_reader(_descriptor(self._router), self._read_router)
        loop.add_reader(_descriptor(self._pull), self._read_pull)
        # The descriptors signal changes only, and one may have been before we looked.
        loop.call_soon(self._read_router)
        loop.call_soon(self._read_pull)
        self._checked_at = loop.time()
        self._watch = loop.call_later(self._watch_interval_s, self._check_heartbeats)

    # --------------------------------------------------------------------------------- calls

    @property
    def num_in_flight(self) -> int:
        """Requests without a last output so far."""
        return len(self._streams)

    def stream(
        self,
        request: EngineCoreRequest,
        *,
        wakeup: Wakeup | None = None,
        timeline: Timeline | None = None,
    ) -> RequestStream:
        """Send a request and return the stream of its outputs. Closing that early aborts it.

        Args:
            request: its id must be unique; `data_parallel_rank` None leaves the choice to the load
                balancer.
            wakeup: set whenever an output comes, for readers of several streams.
            timeline: takes in the request's times.

        Raises:
            EngineDeadError: an engine core is gone.
        """
        self._raise_if_dead()
        engine = self._choose_engine(request.data_parallel_rank)
        if request.client_index != self._client_index:
            request = msgspec.structs.replace(request, client_index=self._client_index)
        stream = RequestStream(request.request_id, self._abort_one, wakeup, timeline)
        stream.timeline.engine_index = engine.index
        self._send(engine, RequestType.ADD, request)
        self._streams[request.request_id] = (stream, engine)
        engine.load.num_unreported += 1
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests; their streams end with no further output. Unknown ids are ignored."""
        for stream in self._forget(request_ids):
            stream.is_finished = True
            stream.wakeup.set()

    def fail_all(self, error: RaywireError) -> None:
        """Abort everything; readers get `error`."""
        for stream in self._forget(list(self._streams)):
            stream.fail(error)

    def _forget(self, request_ids: Iterable[str]) -> list[RequestStream]:
        """Drop requests here and on their engine cores."""
        streams: list[RequestStream] = []
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            entry = self._streams.pop(request_id, None)
            if entry is not None:
                streams.append(entry[0])
                by_engine.setdefault(entry[1].index, []).append(request_id)
        for index, ids in by_engine.items():
            # A core that is gone has nothing left to abort, and its death is reported elsewhere.
            with contextlib.suppress(EngineDeadError):
                self._send(self.engines[index], RequestType.ABORT, ids)
        return streams

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
            UnavailableError: no answer in time.
        """
        self._raise_if_dead()
        indices = range(len(self.engines)) if engine_index is None else [engine_index]
        calls = {self._send_call(self.engines[i], method, args): i for i in indices}
        futures = [self._calls[call_id] for call_id in calls]
        try:
            async with asyncio.timeout(timeout_s):
                answers = await asyncio.gather(*futures)
        except TimeoutError as error:
            raise UnavailableError(f"{method}: no answer within {timeout_s:.0f} s") from error
        finally:
            for call_id in calls:
                self._calls.pop(call_id, None)
        return [utility.read_answer(method, answer) for answer in answers]

    def _send_call(self, engine: EngineHandle, method: str, args: tuple[object, ...]) -> int:
        call_id = self._next_call_id
        self._next_call_id += 1
        call = utility.make_call(self._client_index, call_id, method, args)
        self._send(engine, RequestType.UTILITY, call)
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        return call_id

    def _choose_engine(self, rank: int | None) -> EngineHandle:
        if rank is None:
            rank = 0 if len(self.engines) == 1 else choose([e.load for e in self.engines])
        elif not 0 <= rank < len(self.engines):
            raise InvalidRequestError(
                f"data_parallel_rank must be from 0 to {len(self.engines) - 1}, not {rank}",
                "data_parallel_rank",
            )
        if rank is None or self.engines[rank].identity is None:
            raise UnavailableError("no engine core is ready")
        return self.engines[rank]

    def _send(self, engine: EngineHandle, kind: RequestType, message: object) -> None:
        """Send one message. Large arrays are not copied: they must stay as they are until sent."""
        if engine.identity is None:
            raise UnavailableError("no engine core is ready")
        frames = [engine.identity, kind.value, *self._encoder.encode(message)]
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            raise self._on_unreachable(engine) from error
        # Sending handles the socket's pending commands, after which its descriptor stays silent
        # about what came in meanwhile.
        self._read_router()

    def _abort_one(self, request_id: str) -> None:
        self.abort((request_id,))

    # ------------------------------------------------------------------------------- incoming

    def _read_router(self) -> None:
        self._read(self._router, self._on_ready, self._read_router)

    def _read_pull(self) -> None:
        self._read(self._pull, self._on_output, self._read_pull)

    def _read(
        self,
        socket: "zmq.Socket[bytes]",
        handle: Callable[[list[bytes]], None],
        again: Callable[[], None],
    ) -> None:
        """Read until nothing is left, because the descriptor signals changes only."""
        if self._loop is None:
            return
        for _ in range(_DRAIN_AT_ONCE):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                handle(frames)
            except WireError as error:
                self._on_bad_message(error)
        self._loop.call_soon(again)

    def _on_ready(self, frames: list[bytes]) -> None:
        identity, *body = frames
        index, epoch = unpack_identity(identity)
        ready = self._decode_ready(body)
        if (ready.engine_index, ready.epoch) != (index, epoch) or index >= len(self.engines):
            raise WireError(f"READY of rank {ready.engine_index} came from rank {index}")
        engine = self.engines[index]
        if engine.ready is not None and engine.ready.epoch >= epoch:
            self.num_stale_messages += 1
            return
        if difference := self._difference_to_others(ready):
            self._refusal = ConfigError(difference)
            self._starting.set()
            return
        engine.identity, engine.ready = identity, ready
        engine.state, engine.load.is_up = "up", True
        engine.heartbeat = None  # how long it has been loading is no step's age
        engine.last_seen = self._now()
        logger.info(
            "engine core is ready engine_index=%d epoch=%d max_model_len=%d num_gpu_blocks=%d"
            " kv_cache_size_tokens=%d load_s=%.1f",
            index,
            epoch,
            ready.max_model_len,
            ready.num_gpu_blocks,
            ready.kv_cache_size_tokens,
            ready.load_s,
        )
        self._starting.set()

    def _difference_to_others(self, ready: EngineReady) -> str | None:
        for engine in self.engines:
            if engine.ready is not None and engine.index != ready.engine_index:
                parts = differences(engine.ready.fingerprint, ready.fingerprint)
                if parts:
                    return (
                        f"engine core {ready.engine_index} differs from engine core"
                        f" {engine.index}: {'; '.join(parts)}"
                    )
        return None

    def _on_output(self, frames: list[bytes]) -> None:
        kind, *body = frames
        if kind == OutputType.OUTPUTS.value:
            self._on_outputs(self._decode_outputs(body))
        elif kind == OutputType.HEARTBEAT.value:
            self._on_heartbeat(self._decode_heartbeat(body))
        elif kind == OutputType.DEAD.value:
            self._on_dead(self._decode_dead(body))
        else:
            raise WireError(f"unknown output type {kind[:8]!r}")

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        engine = self._sender(outputs.engine_index, outputs.epoch)
        if engine is None or engine.ready is None:  # READY travels on another socket
            return
        engine.last_seen = self._now()
        streams, timestamp = self._streams, outputs.timestamp
        for output in outputs.outputs:
            entry = streams.get(output.request_id)
            if entry is None:
                continue  # aborted here while its output was on the way
            if output.finish_reason is not None:
                del streams[output.request_id]
            entry[0].push(output, timestamp)
        if outputs.stats is not None:
            engine.load.report(outputs.stats.num_waiting, outputs.stats.num_running)
            if self.on_stats is not None:
                self.on_stats(engine.index, outputs.stats)
        if outputs.utility is not None:
            future = self._calls.get(outputs.utility.call_id)
            if future is not None and not future.done():
                future.set_result(outputs.utility)

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        engine = self._sender(heartbeat.engine_index, heartbeat.epoch)
        if engine is not None:  # also while it loads: the start timeout tells where it was
            engine.last_seen = self._now()
            engine.heartbeat = heartbeat

    def _on_dead(self, dead: EngineDead) -> None:
        if dead.engine_index >= len(self.engines):
            raise WireError(f"last words of unknown rank {dead.engine_index}")
        ready = self.engines[dead.engine_index].ready
        if ready is not None and ready.epoch != dead.epoch:
            self.num_stale_messages += 1
            return
        self._declare_dead(dead.engine_index, dead.cause)

    def _sender(self, index: int, epoch: int) -> EngineHandle | None:
        """The engine core a message came from, or None if it is to be dropped."""
        if index >= len(self.engines):
            raise WireError(f"a message of unknown rank {index}")
        engine = self.engines[index]
        if engine.ready is not None and engine.ready.epoch != epoch:
            self.num_stale_messages += 1
            return None
        return engine

    def _on_bad_message(self, error: WireError) -> None:
        self.num_bad_messages += 1
        # Powers of two: a broken peer must not fill the disk.
        if self.num_bad_messages & (self.num_bad_messages - 1) == 0:
            logger.warning("dropped a bad message total=%d: %s", self.num_bad_messages, error)

    # ----------------------------------------------------------------------------- life and death

    def mark_dead(self, engine_index: int, cause: str) -> None:
        """Say that an engine core is gone. From any thread; only the first call has an effect."""
        with self._lock:
            loop = self._loop
            if loop is not None and not _is_current(loop):
                loop.call_soon_threadsafe(self._declare_dead, engine_index, cause)
                return
        self._declare_dead(engine_index, cause)

    def _declare_dead(self, engine_index: int, cause: str, is_first: bool = False) -> None:
        """Take note of a death. `is_first`: nobody else has seen it, so we log its cause."""
        if self.death is not None or self._is_closed:
            return
        engine = self.engines[engine_index]
        engine.state = "hung" if engine.state == "hung" else "dead"
        engine.load.is_up = False
        self.death = EngineDeadError(engine_index, cause)
        if is_first:
            logger.error("first cause: engine core %d: %s", engine_index, cause)
        else:
            logger.warning("engine core %d is dead, cause: %s; stopping", engine_index, cause)
        self._fail_all(self.death)
        self._starting.set()
        if self.on_death is not None:
            self.on_death(self.death)

    def _fail_all(self, error: RaywireError) -> None:
        streams, self._streams = self._streams, {}
        for stream, _ in streams.values():
            stream.fail(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _raise_if_dead(self) -> None:
        # A new object each time: a traceback grows on the one that is raised.
        if self.death is not None:
            raise EngineDeadError(self.death.engine_index, self.death.cause)
        if self._refusal is not None:
            raise ConfigError(str(self._refusal))

    def _on_unreachable(self, engine: EngineHandle) -> EngineDeadError:
        cause = "its connection is gone"
        if self._loop is not None:
            self._loop.call_later(
                _UNREACHABLE_GRACE_S, self._declare_dead, engine.index, cause, True
            )
        return EngineDeadError(engine.index, cause)

    def _check_heartbeats(self) -> None:
        loop = self._loop
        if loop is None:
            return
        self._read_pull()
        self._read_router()
        if self._now() - self._checked_at > 3 * self._watch_interval_s:
            # This process was stopped or starved itself: whatever is silent gets a new chance.
            for engine in self.engines:
                engine.last_seen = self._now()
        self._checked_at = self._now()
        for engine in self.engines:
            if (cause := self._why_hung(engine)) and self.death is None:
                engine.state = "hung"
                self._declare_dead(engine.index, cause, is_first=True)
        self._watch = loop.call_later(self._watch_interval_s, self._check_heartbeats)

    def _why_hung(self, engine: EngineHandle) -> str | None:
        if engine.ready is None:
            return None
        silence_s = self._now() - engine.last_seen
        if silence_s > self._heartbeat_timeout_s:
            return f"hung: no heartbeat for {silence_s:.1f} s; last seen in {engine.describe()}"
        if engine.heartbeat and engine.heartbeat.age_ms > self.step_limit_s * 1000:
            return f"hung: no progress; last seen in {engine.describe()}"
        return None

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()


def _descriptor(socket: "zmq.Socket[bytes]") -> int:
    """What the event loop watches. It signals changes, not states."""
    return int(socket.getsockopt(zmq.FD))


def _is_current(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the caller runs on `loop`."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
