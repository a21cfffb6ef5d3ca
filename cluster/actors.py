"""What runs in Ray's actors: plain classes, and the factory that makes actor classes of them.

    ray::EngineCore_DP0         EngineActor: the same core as a child process (`engine/process.py`)
    └── RAYWIRE::Worker_…       its workers: local child processes, as everywhere
    ray::DPCoordinator          CoordinatorActor (`coordinator_actor`), on the command's node

Ray titles an actor's process by its class, so every rank gets a class of its own name. Its main
thread and its signals are Ray's: the core runs on the thread of the long call `run`, and is ended
by the call `stop`, which has a thread of its own. What `run` returns is the core's end; a process
that dies has none, and Ray tells.

Nothing here imports Ray; tests use the plain classes.
"""

import dataclasses
import logging
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import environment
from cluster.command_watch import ProcessIdentity, end_with
from cluster.deadline import Deadline
from cluster.model_on_node import PortableModel, resolve_portable
from cluster.run_folder import join_run
from cluster.wire_reach import check_reach
from engine import log, run_log
from engine.config import EngineConfig
from engine.curve import CurveKeys
from engine.errors import EXIT_CONFIG, ConfigError
from engine.process import EngineProcess
from workers.executor import start_executor

logger = logging.getLogger(__name__)

_OPENMP_THREADS = "OMP_NUM_THREADS"

_OVER_S = 10.0
"""How long an actor outlives its work."""

_LEAST_S = 0.1
"""A timeout has to be positive, also when it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """All that an engine core is given, written by the command."""

    config: EngineConfig
    """Its model's path and type are those of the command's node."""

    model: PortableModel | None
    """What to look for on another node; None on the command's, where it is found."""

    node: str
    """How messages call the node."""

    command: ProcessIdentity | None
    """The command's process, where it is on the same node."""

    variables: Mapping[str, str]
    """Environment variables of the command that count here too. Not in Ray's `runtime_env`, which
    its dashboard shows: there may be tokens among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Which process an actor is."""

    pid: int

    public_key: bytes | None = None
    """Of its wires (`engine.curve`); None on ipc. The secret one never leaves the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an engine core ended, if it ended by itself."""

    exit_code: int
    """As that of a child process: 0 or negative after a stop."""

    cause: str | None = None
    """Where no wire has told it: the core did not get as far as having one."""


class EngineActor:
    """One engine core. `run` is its whole life."""

    def __init__(self, start: EngineStart) -> None:
        self._start = start
        self._process: EngineProcess | None = None
        self._is_stopped = False
        adopt(start.variables)
        rank = start.config.parallel.data_parallel_rank
        name = f"EngineCore_DP{rank}"
        log.configure(name, start.config.log_level)
        run_log.keep(self._run_folder(), name, catches_crashes=False)
        if start.command is not None:
            end_with(start.command)
        self._keys = None if start.config.wire.curve is None else CurveKeys.generate()

    def _run_folder(self) -> str | None:
        """On another node a folder of the same name, in that node's cache."""
        folder = self._start.config.run_folder
        if folder is None or self._start.model is None:
            return folder
        return join_run(environment.read(os.environ).cache_dir, Path(folder).name)

    def describe(self) -> Site:
        return Site(pid=os.getpid(), public_key=None if self._keys is None else self._keys.public)

    def run(self, start_timeout_s: float) -> End:
        """Load, serve, end. Ray's threads live as long as the process, as the workers need.

        Args:
            start_timeout_s: what is left of the start's one deadline.
        """
        deadline = Deadline(start_timeout_s)
        _hide_main_module()
        try:
            self._check_reach()
            process = self._process = EngineProcess(self._config(deadline), self._keys)
        except ConfigError as error:
            return End(exit_code=EXIT_CONFIG, cause=f"on node {self._start.node}: {error}")
        if self._is_stopped:
            process.stop()
        return End(exit_code=process.run(start_executor))

    def stop(self) -> None:
        """End `run` after the step under way, or when the model has loaded. Returns at once."""
        self._is_stopped = True
        if self._process is not None:
            self._process.stop()

    def _check_reach(self) -> None:
        wire = self._start.config.wire
        # A later incarnation has an address that others of this server reach: it tries and tries.
        if self._keys is not None and self._start.model is not None and wire.epoch == 0:
            check_reach(wire, self._keys, self._start.node)

    def _config(self, deadline: Deadline) -> EngineConfig:
        """The settings, with the model as it is on this node."""
        cache_dir = environment.read(os.environ).cache_dir
        config = dataclasses.replace(self._start.config, run_folder=run_log.folder())
        # torch makes this folder when it is imported, and would leave it in the temporary folder.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir / "torchinductor"))
        if self._start.model is not None:
            found = resolve_portable(self._start.model, cache_dir=cache_dir)
            here = dataclasses.replace(
                config.model, path=str(found.path), model_type=found.model_type
            )
            config = dataclasses.replace(config, model=here)
        executor = dataclasses.replace(
            config.executor,
            kernel_cache_dir=str(cache_dir),
            # The model may have taken its time.
            start_timeout_s=max(_LEAST_S, round(deadline.left_s, 1)),
        )
        return dataclasses.replace(config, executor=executor)


def adopt(variables: Mapping[str, str]) -> None:
    """Make variables of the command's environment this process's own.

    Ray has set OMP_NUM_THREADS to the CPUs that the actor reserves, and workers would inherit it.
    How many threads they get is for them to say (`workers.resources`), unless the user has: for
    the node, for the job or for the command.
    """
    if _OPENMP_THREADS not in _initial_environment():
        os.environ.pop(_OPENMP_THREADS, None)
    os.environ.update(variables)


def _initial_environment() -> set[str]:
    """The names of the variables that this process was started with, whatever was set since."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # no Linux: then Ray's number stays
        return {_OPENMP_THREADS}
    return {os.fsdecode(entry.partition(b"=")[0]) for entry in entries}


def _hide_main_module() -> None:
    """A spawned worker imports its parent's `__main__` again. That is Ray's, and would bring Ray
    along: a second of time and 70 MB for each worker."""
    sys.modules["__main__"] = types.ModuleType("__main__")


def variables_for_nodes(environ: Mapping[str, str], *, is_ray_job: bool) -> dict[str, str]:
    """What of the command's environment engine cores need on any node: our own variables, and
    those of the hub's client; no keys, which are for who answers clients. Pure.

    Args:
        environ: of the command.
        is_ray_job: then its OMP_NUM_THREADS is Ray's, not the user's: his reaches the actors with
            the job's other variables.
    """
    prefixes = ("RAYWIRE_", "HF_")
    names = set() if is_ray_job else {_OPENMP_THREADS}
    return {
        n: value
        for n, value in environ.items()
        if (n in names or n.startswith(prefixes)) and n not in environment.SECRETS
    }


def _leave() -> None:
    """End this process when its work has been over for a while. The command has Ray kill it at
    once; but it cannot where the link is cut, and one that comes back later has nobody."""
    time.sleep(_OVER_S)
    os._exit(0)


def make_actor_class(ray: Any, plain: type, title: str) -> Any:
    """`plain` as a Ray actor class whose processes `ps` shows as `ray::title`. All its methods are
    answered while `run` goes on. Restarting an actor is the server's business, so Ray does not."""

    def control(name: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            return getattr(plain, name)(self, *arguments)

        return ray.method(concurrency_group="control")(call)  # type: ignore[no-any-return]

    def run(self: Any, *arguments: Any) -> Any:
        try:
            return plain.run(self, *arguments)  # type: ignore[attr-defined]
        finally:
            threading.Thread(target=_leave, name="leave", daemon=True).start()

    methods = {n: control(n) for n in vars(plain) if n != "run" and not n.startswith("_")}
    methods["run"] = run
    named = type(title, (plain,), {**methods, "__module__": plain.__module__})
    return ray.remote(concurrency_groups={"control": 1}, max_restarts=0, max_task_retries=0)(named)
