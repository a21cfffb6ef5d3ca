"""Start order, readiness and stop order of a server: what `raywire serve` does.

    1. take the HTTP port
    2. answer on it (503, but for /live)
    3. bind the ipc sockets
    4. the model becomes a local folder
    5. spawn the engine cores
    6. all cores say READY; serve

Stopping goes the other way: no new requests, running ones end, client, engine cores (which end
their workers), folder. `library` does the same for an `LLM` object.
"""

import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

from api.config import ApiConfig
from api.engine_client import EngineClient
from api.process import run as run_api_server
from cluster.addresses import IpcFolder, WireBinder, ipc_folder, sweep, wire_config
from cluster.config import EngineOptions, ResolvedModel, ServeConfig
from cluster.environment import Environment
from cluster.local_engines import engine_child
from cluster.model_source import resolve
from cluster.plan import Topology
from cluster.supervisor import Supervisor
from cluster.waterfall import Waterfall, process_age_s
from engine.bound import ServerWires
from engine.errors import EXIT_CONFIG, ConfigError
from engine.lifecycle import set_title, stop_on_signals
from workers.model_shape import check_options
from workers.supported import check_model_folder, read_config

logger = logging.getLogger(__name__)

_EXECUTOR_SPEAKS_FIRST_S = 10.0
"""Workers that load too slowly are named by their executor, at --startup-timeout; the API server,
which knows less, gives it time to say so."""


def resolve_model(options: EngineOptions, variables: Environment) -> ResolvedModel:
    """Turn what the user named into a local folder that the workers can load as he asks.

    Raises:
        ConfigError: it cannot be found, downloaded, converted or loaded, or contradicts the
            options.
    """
    folder = resolve(options.model, cache_dir=variables.cache_dir)
    model_type = check_model_folder(folder)
    check_options(
        read_config(folder),
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        max_model_len=None if options.max_model_len == "auto" else options.max_model_len,
    )
    return ResolvedModel(name=options.model, path=folder, model_type=model_type)


def serve(config: ServeConfig, http_socket: socket.socket) -> int:
    """Run a server until it is stopped or an engine core dies. Main thread only.

    Args:
        config: what was asked for.
        http_socket: listens already (`http_socket.listen`).

    Returns:
        The exit code: 0 after a stop, 1 after a death.

    Raises:
        ConfigError: the settings, the model or this machine cannot work.
    """
    waterfall = Waterfall(process_age_s())
    set_title("APIServer_0")
    # torch makes this folder when it is imported, and would leave it in the temporary folder.
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", str(config.environment.cache_dir / "torchinductor")
    )
    warn_about_cores(config.topology)
    with stop_on_signals() as stop, ipc_folder(config.environment.rpc_base_path) as folder:
        wires = WireBinder(folder).api_server()
        client = make_client(wires, config.topology.num_engines, config.environment)
        supervisor = Supervisor(client.mark_dead, lambda _: client.death is not None)

        def start() -> Path:
            model = resolve_model(config.engine, config.environment)
            waterfall.mark("resolve")
            # The port is taken long since. Said only now: above an error of the model, the line
            # would read as a success.
            logger.info(
                "listening on %s port %d; requests get 503 until the model is loaded",
                config.host,
                http_socket.getsockname()[1],
            )
            configs = config.engine.engine_configs(
                model, wire_config([wires]), config.environment, config.log_level
            )
            supervisor.start([engine_child(each) for each in configs], "spawn")
            supervisor.watch()
            threading.Thread(
                target=_finish_start, args=(client, folder, waterfall), name="start-up", daemon=True
            ).start()
            return model.path

        try:
            code = run_api_server(_api_config(config), http_socket, client, start, stop)
        finally:
            supervisor.close(patience_s(client), is_urgent=lambda: stop.count > 1)
            sweep(folder.path.parent)  # a core that had to be killed may have left its own
    if client.death is not None and EXIT_CONFIG in supervisor.exit_codes:
        raise ConfigError(client.death.cause)
    return code


def warn_about_cores(topology: Topology) -> None:
    """Say once that this machine has fewer cores than the processes want."""
    available = num_available_vcpus()
    if available < topology.min_vcpus:
        logger.warning(
            "%d processes want %d vCPUs and this machine has %d: they will wait for each other;"
            " `raywire plan` explains",
            topology.num_processes,
            topology.min_vcpus,
            available,
        )


def num_available_vcpus() -> int:
    """What this process may use: its CPU set, cut by the container's quota (cgroup v2)."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return count if quota == "max" else min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return count


def patience_s(client: EngineClient) -> float:
    """How long engine cores may take to end. One that loads has workers deep in an import or a
    file, which are not waited for: they die with it. One that hangs will not hear us."""
    is_deaf = any(engine.ready is None or engine.state == "hung" for engine in client.engines)
    return 1.0 if is_deaf else 4.0


def _api_config(config: ServeConfig) -> ApiConfig:
    return ApiConfig(
        served_model_names=config.served_model_name or (config.engine.model,),
        shutdown_timeout_s=config.shutdown_timeout,
        start_timeout_s=config.engine.startup_timeout + _EXECUTOR_SPEAKS_FIRST_S,
        scheduling_policy=config.engine.scheduling_policy,
        chat_template=config.chat_template,
    )


def _finish_start(client: EngineClient, folder: IpcFolder, waterfall: Waterfall) -> None:
    """Once all engine cores are ready: nobody needs the sockets' names any more, and the log gets
    the start-up times."""
    while any(engine.ready is None for engine in client.engines):
        if client.death is not None:
            return
        time.sleep(0.05)
    folder.remove()
    all_ready = [engine.ready for engine in client.engines if engine.ready is not None]
    slowest = max(all_ready, key=lambda ready: ready.load_s)
    waterfall.mark_before("spawn", slowest.load_s)
    waterfall.mark_before("workers", slowest.weights_s + slowest.kv_cache_s)
    waterfall.mark_before("weights", slowest.kv_cache_s)
    waterfall.mark("kv_cache")
    logger.info("ready total=%.1fs %s", waterfall.total_s, waterfall)


def make_client(wires: ServerWires, num_engines: int, variables: Environment) -> EngineClient:
    """The client of `num_engines` engine cores, not yet bound."""
    return EngineClient(
        wires,
        num_engines,
        step_timeout_s=variables.execute_model_timeout_s,
    )
