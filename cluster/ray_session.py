"""This process's connection to a Ray cluster: found or started, used by `ray_engines` and by the
dry run, and ended with the command.

    --ray-address      that cluster; `local` starts one here
    RAY_ADDRESS        that of the job, or of the user's shell
    neither            the one that `ray start` has started on this node, else one of our own

Only `load_ray` imports Ray, when a Ray back end is used: it takes a second, reads its variables at
import, and must not burden a server that runs without it.

`connect` may be called from any thread: the HTTP port answers on the main thread meanwhile. Ray
then leaves Python's signal handlers alone, but not the kernel's: see `_our_signal_handlers`.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from cluster.placement import Node, Resources
from cluster.ray_keeper import RayKeeper
from cluster.ray_refusals import check_reachable, check_version, explain, why_open
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 25.0
"""Ray itself tries for minutes. It knows after 20 s that a token is wrong."""

_START_TIMEOUT_S = 120.0
"""A cluster of our own is ten processes, on a machine that may be busy."""

_OBJECT_STORE_BYTES = 80_000_000
"""The least that Ray takes: nothing of ours goes through its object store."""

_SIGNALS_OF_OURS = (signal.SIGTERM, signal.SIGINT)

_BEFORE_IMPORT = {
    "RAY_DEDUP_LOGS": "0",  # ranks say similar things, and each line counts
    "RAY_COLOR_PREFIX": "0",
}

_BEFORE_START = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # no processes in advance that nobody will use
    # Its name is of other systems, what it does is of all: the node's address is that of the
    # loopback device, so nothing of Ray's listens on another one.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Of a cluster of our own."""


def load_ray() -> Any:
    """Import Ray, set up as we want it, and return it."""
    for name, value in _BEFORE_IMPORT.items():
        os.environ.setdefault(name, value)
    import ray  # the optional back end: see above

    check_version(ray.__version__)
    root = logging.getLogger("ray")
    root.handlers.clear()  # its lines, if they matter, look like ours
    root.propagate = True
    root.setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.getLogger("ray._private.worker").addFilter(_is_no_news)
    return ray


def _is_no_news(record: logging.LogRecord) -> bool:
    """Ray warns that another thread cannot take SIGTERM from us: so it shall be."""
    return "SIGTERM handler is not set" not in record.getMessage()


class RaySession:
    """A connection to a Ray cluster. Made by `connect`; a context manager."""

    def __init__(self, ray: Any, keeper: RayKeeper | None = None) -> None:
        self.ray = ray
        self._keeper = keeper
        self.node_id: str = ray.get_runtime_context().get_node_id()
        self.address: str = ray.util.get_node_ip_address()
        """Of this node, as Ray's other nodes know it."""

    @property
    def is_ours(self) -> bool:
        """Whether we have started the cluster, and end it with the connection."""
        return self._keeper is not None

    def observe_nodes(self) -> list[Node]:
        """The cluster's nodes as they are now, also dead ones."""
        # The one private call: Ray's public ones add up what all nodes have left.
        from ray._private.state import available_resources_per_node

        available = available_resources_per_node()
        return [
            describe_node(row, available.get(row["NodeID"], {}), self.node_id)
            for row in self.ray.nodes()
        ]

    def close(self) -> None:
        """Disconnect; a cluster of our own ends. Idempotent."""
        self.ray.shutdown()
        if self._keeper is not None:
            self._keeper.close()

    def end_within(self, timeout_s: float, end: Callable[[], None]) -> bool:
        """Run the last calls of Ray. Where the cluster's head is gone they wait for it, a minute or
        for ever: False means that they are left behind, and Ray is not to be called again."""
        thread = threading.Thread(target=end, name="ray-end", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            atexit.unregister(self.ray.shutdown)  # it would wait as well
            # And Ray's threads would crash the interpreter that ends under them. SIGTERM ends this
            # process without that, with the exit code that is decided by then (`__main__`).
            atexit.register(signal.raise_signal, signal.SIGTERM)
        return not thread.is_alive()

    def __str__(self) -> str:
        return f"{self.node_id[:8]} ({self.address})"

    def __enter__(self) -> "RaySession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def connect(address: str | None, *, num_cpus: int | None = None) -> RaySession:
    """Connect this process to a cluster, or start one. From any thread; once at a time.

    Args:
        address: `--ray-address`; None looks in RAY_ADDRESS and on this node, see above.
        num_cpus: what a cluster of our own offers at least: it counts CPUs, we only need processes.

    Raises:
        ConfigError: one line, within CONNECT_TIMEOUT_S where the cluster exists: not there, another
            version, a wrong token, …
    """
    named = address or os.environ.get("RAY_ADDRESS") or _cluster_here()
    if named is None or named == "local":
        return _start(num_cpus)
    if named != "auto":
        check_reachable(named)
    ray = load_ray()
    logger.info("connecting to the Ray cluster at %s", named)
    # Always told where: left to search, Ray may find none, and then starts one without a word.
    _init(ray, named, CONNECT_TIMEOUT_S, address=named)
    session = RaySession(ray)
    logger.info("connected to Ray %s as node %s", ray.__version__, session)
    addresses = [row["NodeManagerAddress"] for row in ray.nodes() if row["Alive"]]
    if warning := why_open(os.environ, addresses):
        logger.warning("%s", warning)
    return session


def _start(num_cpus: int | None) -> RaySession:
    """A cluster of our own, on this node and in a folder of its own. It ends with us, however."""
    # All of it before Ray is imported, which reads these only once.
    for name, value in _BEFORE_START.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_MODE" not in os.environ:
        # Said aloud, with a token of its own: Ray would leave one in the user's home folder, and
        # from then on the clusters that he starts want it.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    ray = load_ray()
    logger.info("no Ray cluster here; starting one on this node")
    keeper = RayKeeper(_own_folder(os.environ.get("RAY_TMPDIR")))
    try:
        _init(
            ray,
            "local",
            _START_TIMEOUT_S,
            address="local",
            num_cpus=None if num_cpus is None else max(num_cpus, len(os.sched_getaffinity(0))),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(keeper.folder),
        )
    except ConfigError:
        keeper.leave()
        raise
    session = RaySession(ray, keeper)
    logger.info("started Ray %s as node %s", ray.__version__, session)
    return session


def _own_folder(parent: str | None) -> Path:
    """A new folder with a short name: Ray's sockets are in there, whose paths have at most 107
    bytes."""
    try:
        if parent is not None:
            os.makedirs(parent, exist_ok=True)  # as Ray does
        return Path(tempfile.mkdtemp(prefix="rw-", dir=parent)).absolute()
    except OSError as error:
        where = "the temporary folder" if parent is None else f"RAY_TMPDIR={parent}"
        raise ConfigError(f"no Ray cluster can be started in {where}: {error}") from error


def _cluster_here() -> str | None:
    """The cluster of which `ray start` has made this a node, if it still lives. Ray remembers its
    address in this file, which survives a crash; asked itself, it would try that for minutes."""
    # Who called `ray start` may have had a TMPDIR, as we, or none.
    own = os.environ.get("RAY_TMPDIR")
    for folder in (own,) if own else (os.environ.get("TMPDIR"), "/tmp"):
        with contextlib.suppress(OSError, ConfigError):
            address = (Path(folder or "/tmp") / "ray/ray_current_cluster").read_text().strip()
            check_reachable(address)
            return address
    return None


def _init(ray: Any, shown: str, timeout_s: float, **arguments: Any) -> None:
    """`ray.init` with a deadline and our signal handlers."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            with _our_signal_handlers():
                ray.init(configure_logging=False, log_to_driver=True, **arguments)
            result.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for it
            result.set_exception(error)
        # Ray has its processes killed with the thread that started them, so this one stays.
        threading.Event().wait()

    threading.Thread(target=run, name="ray-init", daemon=True).start()
    try:
        result.result(timeout_s)
    except TimeoutError:
        # Ray looks for its node on this machine, twice as long as this.
        raise ConfigError(
            f"cannot use the Ray cluster at {shown} from here: nothing within {timeout_s:g} s. Is"
            " this machine one of its nodes? If not, submit the command: `ray job submit`"
        ) from None
    except Exception as error:
        ray.shutdown()  # what it may have started
        raise ConfigError(explain(error, shown)) from error


@contextlib.contextmanager
def _our_signal_handlers() -> Iterator[None]:
    """Keep SIGTERM and SIGINT as they are. Ray's C++ part takes SIGTERM with `sigaction`, past
    Python, to write a stack trace and die; Python's own functions cannot undo that, and only work
    on the main thread."""
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    kept = {}
    for signum in _SIGNALS_OF_OURS:
        kept[signum] = ctypes.create_string_buffer(1024)  # a struct sigaction, whatever its size
        sigaction(signum, None, kept[signum])
    try:
        yield
    finally:
        for signum, action in kept.items():
            sigaction(signum, action, None)


def describe_node(
    row: Mapping[str, Any], available: Mapping[str, float], driver_node_id: str
) -> Node:
    """A row of `ray.nodes()` as placement wants it. Pure."""
    return Node(
        node_id=row["NodeID"],
        address=row["NodeManagerAddress"],
        total=_resources(row["Resources"]),
        available=_resources(available),
        is_driver=row["NodeID"] == driver_node_id,
        is_alive=row["Alive"],
    )


def _resources(amounts: Mapping[str, float]) -> Resources:
    return Resources(
        cpus=amounts.get("CPU", 0.0),
        gpus=amounts.get("GPU", 0.0),
        memory_bytes=int(amounts.get("memory", 0)),
    )
