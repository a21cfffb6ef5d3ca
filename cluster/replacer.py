"""Replaces engine cores that are lost while the others serve on (`--on-engine-death replace`).

    engine group  --on_death-->  replacer  --lose------->  all API servers: streams go on elsewhere
    API servers   --on_loss--->            --restart---->  engine group: a new incarnation
                  --on_up----->

The same loss is heard of from several sides: the process has ended, its last words have come, it
hangs. The first to say so counts, and `replacement` decides what follows. Each loss has one line
with its first cause, whoever logs it (the core itself, the group, or this), and one that says what
follows. Made by `launch`.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, assert_never

from api.engine_handle import Loss
from cluster.engine_group import EngineGroup
from cluster.replacement import GiveUp, GoOn, Replacement, Restart, Verdict
from engine.errors import EXIT_CONFIG, ConfigError, EngineDeadError, ServerError
from engine.wire import EngineReady

logger = logging.getLogger(__name__)

_ONE_LOSS_S = 15.0
"""Ranks of one node that are lost within so long are lost with the node, or with the link to it:
heartbeats are missed after 10 s, and Ray may tell of one rank and not of the next."""

_COORDINATOR_LASTS_S = 15.0
"""A coordinator that ends sooner has failed to start: it loads for a second or two."""


class ApiSide(Protocol):
    """What is asked of the API servers: `front.Front` has it."""

    def lose(self, engine_index: int, epoch: int, cause: str) -> None: ...

    def mark_dead(self, engine_index: int | None, cause: str) -> None: ...

    @property
    def death(self) -> EngineDeadError | None: ...


class Replacer:
    """All methods are for any thread and return at once; engine cores are started in threads of
    its own.

    Args:
        num_engines: of this server.
        first_rank: data-parallel rank of the first one.
        start_timeout_s: a new engine core that is not ready by then has failed.
        is_draining: whether the server is ending.
    """

    def __init__(
        self,
        num_engines: int,
        *,
        first_rank: int = 0,
        start_timeout_s: float,
        is_draining: Callable[[], bool],
    ) -> None:
        self._num_engines = num_engines
        self._first_rank = first_rank
        self._start_timeout_s = start_timeout_s
        self._is_draining = is_draining
        self._policy = Replacement(num_engines)
        self._coordinator = Replacement(1)
        """Of the coordinator. It says READY to nobody here, so it is up once it has lasted."""
        self._last_words: dict[tuple[int, int], str] = {}
        self._lost_on: dict[str, tuple[int, float]] = {}
        """By node: the rank that was the first to be lost there without a word, and when."""
        self._changed = threading.Condition()
        """Guards the three above."""
        self._is_closed = False
        self._front: ApiSide | None = None
        self._engines: EngineGroup | None = None

    def attach(self, front: ApiSide, engines: EngineGroup) -> None:
        """Whose they are. Before anything starts."""
        self._front, self._engines = front, engines

    def serve(self) -> None:
        """All engine cores are up, and requests are served."""
        with self._changed:
            self._policy.serve()
            self._coordinator.serve()

    def close(self) -> None:
        """Start nothing any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def loading(self) -> list[int]:
        """Engine cores that have been started anew and are not up."""
        with self._changed:
            return self._policy.expected

    # ------------------------------------------------------------- what the engine group tells

    def has_said_why(self, engine_index: int | None, epoch: int) -> bool:
        """See `EngineGroup`."""
        assert self._front is not None
        if self._front.death is not None:
            return True
        if engine_index is None:
            return False  # nobody but its parent can tell
        with self._changed:
            is_known = self._policy.is_known(engine_index, epoch)
            is_told = is_known or (engine_index, epoch) in self._last_words
            return is_told or self._node_loss(engine_index, epoch)[1] is not None

    def on_death(self, engine_index: int | None, epoch: int, cause: str) -> None:
        """See `EngineGroup`. The group has logged the cause, or somebody else."""
        assert self._front is not None
        assert self._engines is not None
        if engine_index is None:
            self._take_coordinator(epoch, cause)
            return
        is_hopeless = self._engines.exit_codes[engine_index] == EXIT_CONFIG
        with self._changed:
            cause = self._last_words.get((engine_index, epoch), cause)
        self._take(Loss(engine_index, epoch, cause), is_hopeless=is_hopeless)

    # --------------------------------------------------------------- what the API servers tell

    def on_loss(self, loss: Loss) -> None:
        """An API server has heard the last words of an engine core, or it hangs."""
        index, epoch = loss.engine_index, loss.epoch
        with self._changed:
            if not loss.is_first:
                self._last_words.setdefault((index, epoch), loss.cause)
            if not loss.is_first and self._policy.is_expected(index, epoch):
                return  # it has no streams, and its exit code will say whether there is any hope
        self._take(loss)

    def on_up(self, ready: EngineReady) -> None:
        """An API server has heard READY."""
        with self._changed:
            is_news = self._policy.take_ready(ready.engine_index, ready.epoch)
            num_up = self._policy.num_up
            self._changed.notify_all()
        if is_news:
            logger.info(
                "%s is back under epoch %d; %s",
                self._name(ready.engine_index),
                ready.epoch,
                self._how_many(num_up),
            )

    # ---------------------------------------------------------------------------------- the rest

    def _take(self, loss: Loss, *, is_hopeless: bool = False) -> None:
        assert self._front is not None
        index, epoch, cause = loss.engine_index, loss.epoch, loss.cause
        with self._changed:
            node, first = self._node_loss(index, epoch)
            verdict = self._policy.take_loss(
                index,
                epoch,
                time.monotonic(),
                is_hopeless=is_hopeless,
                is_draining=self._is_draining() or self._is_closed,
            )
            num_up = self._policy.num_up
            if verdict is not None and node is not None and first is None:
                self._lost_on[node] = (index, time.monotonic())
            self._changed.notify_all()
        if verdict is None:
            return
        if first is not None:
            logger.warning(
                "%s is lost with %s, whose first cause is logged above, on node %s: %s",
                self._name(index),
                self._name(first),
                node,
                cause,
            )
        elif loss.is_first and self._front.death is None:
            logger.error("first cause: %s: %s", self._name(index), cause)
        self._carry_out(verdict, loss, num_up)

    def _node_loss(self, index: int, epoch: int) -> tuple[str | None, int | None]:
        """The node that may have taken a rank along, unless that has ended by itself; and the rank
        that it had taken first, if so. Under the lock."""
        assert self._engines is not None
        node = self._engines.node_of(index)
        has_words = (index, epoch) in self._last_words
        if node is None or has_words or self._policy.is_expected(index, epoch):
            return None, None
        first, at_s = self._lost_on.get(node, (index, 0.0))
        is_one_loss = first != index and time.monotonic() - at_s < _ONE_LOSS_S
        return node, first if is_one_loss else None

    def _carry_out(self, verdict: Verdict, loss: Loss, num_up: int) -> None:
        assert self._front is not None
        index, cause = loss.engine_index, loss.cause
        match verdict:
            case Restart(epoch, delay_s):
                self._front.lose(index, loss.epoch, cause)
                when = f" in {delay_s:.0f} s" if delay_s else ""
                logger.warning(
                    "%s is replaced%s, under epoch %d; %s",
                    self._name(index),
                    when,
                    epoch,
                    self._how_many(num_up),
                )
                threading.Thread(
                    target=self._replace,
                    args=(index, epoch, delay_s),
                    name=f"replace-{index}",
                    daemon=True,
                ).start()
            case GoOn():
                self._front.lose(index, loss.epoch, cause)
                logger.warning(
                    "%s is not replaced while the server ends; %s",
                    self._name(index),
                    self._how_many(num_up),
                )
            case GiveUp(reason):
                self._give_up(index, cause, reason)
            case _:
                assert_never(verdict)

    def _replace(self, index: int, epoch: int, delay_s: float) -> None:
        assert self._engines is not None
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, delay_s)
            if self._is_closed:
                return
        try:
            self._engines.restart(index, epoch)
        except (ConfigError, ServerError, OSError) as error:
            if not self._is_closed:
                is_hopeless = isinstance(error, ConfigError)
                self._take(Loss(index, epoch, str(error), is_first=True), is_hopeless=is_hopeless)
            return
        with self._changed:
            is_settled = self._changed.wait_for(
                lambda: self._is_closed or not self._policy.is_expected(index, epoch),
                self._start_timeout_s,
            )
        if not is_settled:
            cause = f"no READY within {self._start_timeout_s:.0f} s"
            self._take(Loss(index, epoch, cause, is_first=True))

    def _take_coordinator(self, epoch: int, cause: str) -> None:
        assert self._front is not None
        with self._changed:
            is_draining = self._is_draining() or self._is_closed
            verdict = self._coordinator.take_loss(0, epoch, time.monotonic())
            self._changed.notify_all()
        match verdict:
            case Restart() if is_draining:
                logger.warning("the coordinator is not replaced while the server ends")
            case Restart(next_epoch, delay_s):
                logger.warning(
                    "the coordinator is replaced; meanwhile ranks are chosen by what they say"
                    " themselves"
                )
                threading.Thread(
                    target=self._replace_coordinator,
                    args=(next_epoch, delay_s),
                    name="replace-coordinator",
                    daemon=True,
                ).start()
            case GiveUp(reason):
                self._give_up(None, cause, reason)
            case GoOn():  # to no coordinator: it is told of no drain
                raise AssertionError("the coordinator cannot be done without")
            case None:
                pass
            case _:
                assert_never(verdict)

    def _replace_coordinator(self, epoch: int, delay_s: float) -> None:
        assert self._engines is not None
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, delay_s)
            if self._is_closed:
                return
        try:
            self._engines.restart_coordinator(epoch)
        except (ServerError, OSError) as error:
            if not self._is_closed:
                logger.error("first cause: the coordinator cannot be started: %s", error)
                self._take_coordinator(epoch, str(error))
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or not self._coordinator.is_expected(0, epoch),
                _COORDINATOR_LASTS_S,
            )
            self._coordinator.take_ready(0, epoch)

    def _give_up(self, index: int | None, cause: str, reason: str | None) -> None:
        assert self._front is not None
        if reason is not None:
            logger.warning("the server ends: %s", reason)
            cause = f"{cause}; {reason}"
        self._front.mark_dead(index, cause)

    def _name(self, index: int) -> str:
        return f"engine core DP{self._first_rank + index}"

    def _how_many(self, num_up: int) -> str:
        return f"{num_up} of {self._num_engines} ranks serve"
