"""What follows when an engine core is gone. Part of `engine_client`, on its loop.

    gone --+-- by default ----------------------------> death: the service of all ends
           +-- where ranks are replaced, and serve ---> loss: its requests go on at other ranks

It is gone when it says so, when it hangs, when nothing can be sent to it, or when whoever watches
its process says it. After a death every pending and every later call raises EngineDeadError. After
a loss, what this incarnation may still say is dropped, and it is told that it has been given up.
"""

import logging
from collections.abc import Callable

from api.dispatcher import Dispatcher
from api.engine_handle import EngineHandle, Loss
from api.engine_registry import EngineRegistry
from api.engine_wire import EngineWire
from api.load_balancer import LoadBalancer
from api.request_stream import Wakeup
from api.utility_calls import UtilityCalls
from engine.errors import ConfigError, EngineDeadError, RaywireError, UnavailableError
from engine.wire import EngineLoad, Fence, RequestType, pack_identity

logger = logging.getLogger(__name__)

_FENCE_INTERVAL_S = 1.0
"""How often an incarnation that has been given up, and still speaks, is told so."""


class EngineDeaths:
    """Deaths and losses among the engine cores of one API server.

    Args:
        registry: knows which incarnation counts.
        balancer: sends no more requests to one that is gone.
        dispatcher: has the requests that it had.
        calls: has the UTILITY calls that it had.
        wire: what incarnations are told over that have been given up.
        take_load: hears that a rank which is lost has no load.
        wake_start: wakes whoever waits for the start.
        replaces_ranks: somebody starts a new one in the place of one that is gone.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        balancer: LoadBalancer,
        dispatcher: Dispatcher,
        calls: UtilityCalls,
        wire: EngineWire,
        *,
        take_load: Callable[[EngineLoad], None],
        wake_start: Callable[[], None],
        replaces_ranks: bool,
    ) -> None:
        self.death: EngineDeadError | None = None
        """The first cause, once an engine core is gone for good."""
        self.on_death: Callable[[EngineDeadError, bool], None] | None = None
        """Called once, after all calls have been failed. The second argument: whether nobody else
        has seen it, so that its cause has yet to be logged as the first."""
        self.on_loss: Callable[[Loss], None] | None = None
        """Called for each loss that the wire tells of or this client sees itself, after its
        requests have gone elsewhere."""
        self.dying = Wakeup()
        """Set at the death."""
        self.is_serving = False
        """The engine cores serve: this API server, or others before it."""
        self._registry = registry
        self._balancer = balancer
        self._dispatcher = dispatcher
        self._calls = calls
        self._wire = wire
        self._take_load = take_load
        self._wake_start = wake_start
        self._replaces_ranks = replaces_ranks
        self._refusal: ConfigError | None = None
        self._fenced_at: dict[tuple[int, int], float] = {}
        self._is_closed = False

    @property
    def are_outlived(self) -> bool:
        """Whether the end of an engine core is a loss."""
        return self._replaces_ranks and self.is_serving

    def raise_if_dead(self) -> None:
        """Raise EngineDeadError after a death, ConfigError where one was refused at the start."""
        # A new object each time: a traceback grows on the one that is raised.
        if self.death is not None:
            raise EngineDeadError(*self.death.args)
        if self._refusal is not None:
            raise ConfigError(str(self._refusal))

    def close(self) -> None:
        """From now on they are no news."""
        self._is_closed = True

    def fail_all(self, error: RaywireError) -> None:
        """All that is pending fails, and no engine core is told."""
        self._dispatcher.drop_all(error)
        self._calls.fail(error)

    # ----------------------------------------------------------------------- which of the two

    def take(self, engine: EngineHandle, cause: str, is_first: bool = False) -> None:
        """An engine core is gone, as the wire says. `is_first`: nobody has logged its cause."""
        if not self.are_outlived:
            self.declare(engine.index, cause, is_first)
            return
        loss = Loss(engine.index, engine.epoch, cause, is_first)
        if self.lose(loss.engine_index, loss.epoch, cause) and self.on_loss is not None:
            self.on_loss(loss)

    def refuse(self, engine: EngineHandle, epoch: int, difference: ConfigError, now: float) -> None:
        """An engine core is ready, but differs from what it has to be: it might as well be gone."""
        if self.are_outlived:
            self.fence(engine.index, epoch, now)
            self.take(engine, str(difference), is_first=True)
        else:
            self._refusal = difference
            self._wake_start()

    # ---------------------------------------------------------------------------------- death

    def declare(self, engine_index: int | None, cause: str, is_first: bool = False) -> None:
        """End the service of all; None: another process is gone that the server cannot live
        without. Only the first has an effect. `is_first`: nobody has logged its cause, so we do."""
        if self.death is not None or self._is_closed:
            return
        engine = None if engine_index is None else self._registry.engines[engine_index]
        if engine is not None:
            engine.state = "hung" if engine.state == "hung" else "dead"
            self._balancer.mark_down(engine.index)
        self.death = EngineDeadError(None if engine is None else engine.rank, cause)
        if engine is not None and self.on_death is None and is_first:
            logger.error("first cause: %s: %s", engine.name, cause)
        elif engine is not None:
            logger.warning("stopping: %s is dead", engine.name)  # of what, others have said or will
        else:
            logger.warning("stopping: %s", self.death)
        self.fail_all(self.death)
        self._wake_start()
        self.dying.set()
        if self.on_death is not None:
            self.on_death(self.death, is_first)

    # ----------------------------------------------------------------------------------- loss

    def lose(self, engine_index: int, epoch: int, cause: str) -> bool:
        """An incarnation is gone, or has been given up. Returns whether it is news."""
        if self.death is not None or self._is_closed:
            return False
        if not self._registry.give_up(engine_index, epoch):
            return False
        engine = self._registry.engines[engine_index]
        self._balancer.mark_down(engine.index)
        self._calls.fail(UnavailableError(f"{engine.name} is being replaced"), engine.index)
        self._take_load(EngineLoad(engine.index, epoch, 0, 0, 0.0))
        num_moving = self._dispatcher.strand(engine)
        logger.warning("%s epoch=%d is gone: %s", engine.name, epoch, cause)
        num_waiting = self._dispatcher.settle()
        if num_moving:
            logger.info("its requests go on num_moving=%d num_waiting=%d", num_moving, num_waiting)
        return True

    def fence(self, engine_index: int, epoch: int, now: float) -> None:
        """Tell an incarnation that has been given up, and still speaks, that it has been."""
        whose = (engine_index, epoch)
        if not self._replaces_ranks or now - self._fenced_at.get(whose, -1e9) < _FENCE_INTERVAL_S:
            return
        self._fenced_at[whose] = now
        self._wire.send(pack_identity(engine_index, epoch), RequestType.FENCE, Fence(epoch))
