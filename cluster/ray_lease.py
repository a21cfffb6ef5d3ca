"""What a server has of a Ray cluster for as long as it lives: a connection, and room.

`ray_engines` puts engine cores there, and `hybrid` whole servers. The start is a thread of steps,
and so is each restart; `close` may come in the middle of one, from another thread.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from cluster.ray_head import watch_head
from cluster.ray_reservation import Reservation
from cluster.ray_session import RaySession, connect
from engine.errors import ServerError

logger = logging.getLogger(__name__)

_STEP_S = 2.0
"""How long a step may take to notice that it is to end."""


class RayLease:
    """One connection to a cluster with one reservation there.

    Args:
        what: the lease is for; closed early, it says that they were not started.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._stepping = threading.Condition()
        self._num_steps = 0
        self._closing = threading.Lock()
        self._is_closed = threading.Event()
        self._session: RaySession | None = None
        self._room: Reservation | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step of a start, in which Ray may be called: `close` waits for those under way.

        Raises:
            ServerError: it is closed.
        """
        with self._stepping:
            self.check_open()
            self._num_steps += 1
        try:
            yield
        finally:
            with self._stepping:
                self._num_steps -= 1
                self._stepping.notify_all()

    def connect(self, address: str | None, *, num_cpus: int) -> Reservation:
        """Connect, and have nothing reserved yet. Arguments as in `ray_session.connect`."""
        session = self._session = connect(address, num_cpus=num_cpus)
        if not session.is_ours:  # our own is on this machine
            head = session.ray.get_runtime_context().gcs_address
            threading.Thread(
                target=watch_head, args=(head, self.wait_closed), name="ray-head", daemon=True
            ).start()
        self._room = Reservation(self._session, self.check_open, f"raywire-{os.getpid()}")
        return self._room

    @property
    def session(self) -> RaySession:
        assert self._session is not None
        return self._session

    @property
    def ray(self) -> Any:
        return self.session.ray

    @property
    def room(self) -> Reservation:
        assert self._room is not None
        return self._room

    @property
    def is_closed(self) -> bool:
        return self._is_closed.is_set()

    def wait_closed(self, timeout_s: float) -> bool:
        return self._is_closed.wait(timeout_s)

    def check_open(self) -> None:
        if self.is_closed:
            raise ServerError(f"stopped before the {self._what} were started")

    def close(self, end_actors: Callable[[Any], None], within_s: float) -> None:
        """End what runs there, give the room back and disconnect. Idempotent.

        Args:
            end_actors: called with the module `ray`, in a thread of its own; not where nothing was
                ever connected.
            within_s: how long all of it may take.
        """
        self._is_closed.set()
        # A step of the start notices soon, but for `ray.init`, which cannot be cut short: Ray ends
        # with this process then.
        with self._stepping:
            if not self._stepping.wait_for(lambda: self._num_steps == 0, _STEP_S):
                logger.warning("Ray is still connecting; it ends with this process")
                return
        with self._closing:
            session, self._session = self._session, None  # further calls would connect again
            if session is not None and not session.end_within(
                within_s, lambda: self._end(session, end_actors)
            ):
                logger.warning("Ray does not answer; what is left of it ends with this process")

    def _end(self, session: RaySession, end_actors: Callable[[Any], None]) -> None:
        with contextlib.ExitStack() as ending:
            ending.callback(session.close)
            if self._room is not None and not session.is_ours:
                ending.callback(self._room.give_back)
            end_actors(session.ray)
