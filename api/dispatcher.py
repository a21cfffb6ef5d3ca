"""Which engine core has which request of this API server. Part of `engine_client`, on its loop.

    dispatch --> choose a rank --> send --> outputs … --> last output
                      ^                        |
                      +----- `strand` ---------+  its rank is gone

A request belongs to one rank at a time, counts as in flight there, and what comes of it from any
other is dropped. Where ranks are replaced, those of a rank that is gone are stranded until another
one takes them (`settle`); `in_flight` has what they need to go on.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence

from api.engine_handle import EngineHandle
from api.in_flight import MAX_FRUITLESS_MOVES, InFlight
from api.load_balancer import LoadBalancer, Route
from api.request_stream import RequestStream, Wakeup
from api.timeline import Timeline
from engine.errors import EngineDeadError, RaywireError, RequestFailedError, UnavailableError
from engine.wire import EngineCoreOutputs, EngineCoreRequest, RequestType

logger = logging.getLogger(__name__)

Send = Callable[[int, RequestType, object], None]
"""Sends a message to the engine core of that index. EngineDeadError: it is not connected."""


class Dispatcher:
    """The requests of one API server that have no last output so far.

    Args:
        engines: by index.
        balancer: chooses among them.
        send: sends a message to one.
        resends: whether requests go on elsewhere when their rank is gone.
    """

    def __init__(
        self, engines: Sequence[EngineHandle], balancer: LoadBalancer, send: Send, resends: bool
    ) -> None:
        self._engines = engines
        self._balancer = balancer
        self._send = send
        self._resends = resends
        self._in_flight: dict[str, InFlight] = {}
        self._stranded: dict[str, InFlight] = {}
        """Those of them that no rank has."""

    def __len__(self) -> int:
        return len(self._in_flight)

    # ------------------------------------------------------------------------------- requests

    def dispatch(
        self,
        request: EngineCoreRequest,
        wakeup: Wakeup | None,
        timeline: Timeline | None,
        session: str | None,
        follows: Route | None,
    ) -> RequestStream:
        """Send a request to a rank; see `EngineClient.stream`."""
        engine, route = self._send_somewhere(request, session, follows)
        stream = RequestStream(request.request_id, self._abort_one, wakeup, timeline, route)
        stream.timeline.engine_index = engine.index
        self._in_flight[request.request_id] = InFlight(request, stream, engine, session)
        return stream

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests; their streams end with no further output. Unknown ids are ignored."""
        for stream in self._forget(request_ids):
            stream.is_finished = True
            stream.wakeup.set()

    def abort_all(self, error: RaywireError) -> None:
        """Abort everything; readers get `error`."""
        for stream in self._forget(list(self._in_flight)):
            stream.fail(error)

    def drop_all(self, error: RaywireError) -> None:
        """Readers get `error`, and nobody else is told: engine cores are gone, or will be."""
        in_flight, self._in_flight, self._stranded = self._in_flight, {}, {}
        for each in in_flight.values():
            if each.engine is not None:
                self._balancer.finish(each.engine.index)
            each.stream.fail(error)

    def take(self, engine: EngineHandle, outputs: EngineCoreOutputs) -> None:
        """Hand outputs to the streams they belong to."""
        in_flight, timestamp = self._in_flight, outputs.timestamp
        for output in outputs.outputs:
            each = in_flight.get(output.request_id)
            if each is None or each.engine is not engine:
                continue  # aborted here while its output was on the way
            if output.finish_reason is not None:
                del in_flight[output.request_id]
                self._balancer.finish(engine.index)
            if output.details is not None and (prefill := output.details.prefill_stats) is not None:
                self._balancer.correct(each.stream.route, prefill.num_cached_tokens)
            if self._resends:
                output = each.note(output)
            each.stream.push(output, timestamp)

    # --------------------------------------------------------------------------- lost ranks

    def strand(self, engine: EngineHandle) -> int:
        """`engine` is gone: its requests need another. Returns how many they are."""
        moving = {i: each for i, each in self._in_flight.items() if each.engine is engine}
        for each in moving.values():
            self._balancer.finish(engine.index)
            each.leave()
        self._stranded |= moving
        return len(moving)

    def settle(self) -> int:
        """Find a rank for all that have none. Returns how many still wait for one to be up."""
        for request_id, each in list(self._stranded.items()):
            if each.num_fruitless_moves > MAX_FRUITLESS_MOVES:
                del self._stranded[request_id], self._in_flight[request_id]
                deaths = f"{each.num_fruitless_moves} engine cores in a row died with this request"
                logger.error("%s: request_id=%s", deaths, request_id)
                each.stream.fail(RequestFailedError(deaths))
                continue
            try:
                engine, route = self._send_somewhere(each.resumed(), each.session)
            except UnavailableError:
                break
            del self._stranded[request_id]
            each.move(engine, route)
        return len(self._stranded)

    # ---------------------------------------------------------------------------------- parts

    def _abort_one(self, request_id: str) -> None:
        self.abort((request_id,))

    def _forget(self, request_ids: Iterable[str]) -> list[RequestStream]:
        """Drop requests here and on their engine cores."""
        streams: list[RequestStream] = []
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            each = self._in_flight.pop(request_id, None)
            if each is None:
                continue
            streams.append(each.stream)
            if each.engine is None:
                del self._stranded[request_id]
            else:
                self._balancer.finish(each.engine.index)
                by_engine.setdefault(each.engine.index, []).append(request_id)
        for index, ids in by_engine.items():
            # A core that is gone has nothing left to abort, and its death is reported elsewhere.
            with contextlib.suppress(EngineDeadError):
                self._send(index, RequestType.ABORT, ids)
        return streams

    def _send_somewhere(
        self, request: EngineCoreRequest, session: str | None, follows: Route | None = None
    ) -> tuple[EngineHandle, Route]:
        """Send `request` to the best rank. Where that proves to be gone, and its requests go on
        elsewhere, this one goes to the next best."""
        while True:
            route = self._choose(request, session, follows)
            try:
                self._send(route.rank, RequestType.ADD, request)
            except BaseException as error:
                self._balancer.finish(route.rank)
                if not (self._resends and isinstance(error, EngineDeadError)):
                    raise
                self._balancer.mark_down(route.rank)
            else:
                return self._engines[route.rank], route

    def _choose(
        self, request: EngineCoreRequest, session: str | None, follows: Route | None
    ) -> Route:
        """Where `request` goes. From here on it counts as in flight there."""
        if follows is not None and self._balancer.loads[follows.rank].is_up:
            self._balancer.add(follows.rank)
            return follows
        params, adapter = request.sampling_params, request.lora_request
        # The engine core computes all of a prompt whose log probabilities are asked for.
        is_cached = params is None or params.prompt_logprobs is None
        return self._balancer.choose(
            request.prompt_token_ids if is_cached else None,
            session=session,
            salt=(request.cache_salt, None if adapter is None else adapter.name),
            pinned_rank=request.data_parallel_rank,
        )
