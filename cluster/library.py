"""Start order, readiness and stop order of an `LLM` object (`api/llm.py`).

    1. the model becomes a local folder
    2. folder for the ipc sockets
    3. fork (or spawn) the engine cores
    4. bind the ipc sockets
    5. all cores say READY

`launch` does the same for the command.
"""

import logging
import multiprocessing
import os
import sys
import time
import weakref

from api.engine_client import EngineClient
from cluster import environment, start_method
from cluster.addresses import IpcFolder, WireBinder, ipc_base, sweep, wire_config
from cluster.config import EngineOptions, ResolvedModel
from cluster.environment import Environment
from cluster.launch import PATIENCE_S, resolve_model
from cluster.local_engines import engine_child
from cluster.supervisor import Supervisor
from engine.errors import EXIT_CONFIG, ConfigError, EngineDeadError, RaywireError
from engine.lifecycle import here_only

logger = logging.getLogger(__name__)

_EXIT_CODE_S = 15.0
"""How long an engine core that has said why it ends may take to end its workers."""

EXIT_UNGUARDED = 78
"""What a spawned child exits with when the script that it imports makes an LLM at import."""

GUARD_ADVICE = """\
the engine's processes import this script again, and it makes an LLM when it is imported; put that
under a guard:

    if __name__ == "__main__":
        llm = LLM(...)"""


class Engines:
    """The engine cores of one `LLM` object, and the client that speaks to them, not yet bound.

    Made by `start_engines`. They end with `close`, with the garbage collection of this object, with
    the interpreter, and with the process, however that dies; a fork of it leaves them alone.
    """

    def __init__(
        self, options: EngineOptions, variables: Environment, model: ResolvedModel
    ) -> None:
        self.model = model
        folder = IpcFolder(variables.rpc_base_path)
        wires = WireBinder(folder).api_server()
        self.client = EngineClient(step_timeout_s=variables.execute_model_timeout_s)
        client = self.client
        self._supervisor = Supervisor(
            lambda index, _, cause: client.mark_dead(index, cause),
            lambda *_: client.death is not None,
        )
        self._folder = folder
        end = here_only(_end_engines)
        self.close = weakref.finalize(self, end, self._supervisor, client, folder)
        """End everything: ask, wait, kill. Idempotent."""

        configs = options.engine_configs(
            model,
            wire_config([wires]),
            variables,
            options.log_level or variables.log_level or "WARNING",
        )
        method, warning = start_method.choose(
            start_method.observe(), variables.worker_multiproc_method
        )
        if warning is not None:
            logger.warning("%s", warning)
        self._supervisor.start([engine_child(config) for config in configs], method)
        self.client.bind(wires)
        self._supervisor.watch()

    def connected(self) -> None:
        """All engine cores are ready: nobody needs the names of the ipc sockets any more."""
        self._folder.remove()

    def explain(self, death: EngineDeadError) -> RaywireError:
        """What the user should read of a death: a mistake of his as such, without its way up."""
        # A core's last words come before its exit code: it ends its workers in between.
        deadline = time.monotonic() + _EXIT_CODE_S
        while None in self._supervisor.exit_codes and time.monotonic() < deadline:
            time.sleep(0.02)
        if EXIT_CONFIG in self._supervisor.exit_codes:
            return ConfigError(death.cause)
        if EXIT_UNGUARDED in self._supervisor.exit_codes:
            return ConfigError(GUARD_ADVICE)
        return death


def start_engines(options: EngineOptions) -> Engines:
    """Resolve the model and start its engine cores. Returns when they exist, before they are ready.

    Forks unless that is unsafe, so call it before there is any ZeroMQ context. In a child process
    that imports an unguarded script, this is where it ends.

    Raises:
        ConfigError: the options, the environment or the model cannot work.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A spawned child is importing its parent's script: an LLM made here would start a second
        # engine. The parent sees the exit code and tells the user what to add.
        sys.exit(EXIT_UNGUARDED)
    if options.data_parallel_size > 1:
        raise ConfigError("LLM drives one engine: data_parallel_size must be 1")
    variables = environment.read(os.environ)
    for warning in environment.warnings(os.environ):
        logger.warning("%s", warning)
    sweep(ipc_base(variables.rpc_base_path))
    return Engines(options, variables, resolve_model(options, variables))


def _end_engines(supervisor: Supervisor, client: EngineClient, folder: IpcFolder) -> None:
    supervisor.close(PATIENCE_S if client.heeds_stop else 0.0)
    folder.remove()
    sweep(folder.path.parent)  # a core that had to be killed may have left its own
