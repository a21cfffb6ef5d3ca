"""Start order, readiness and stop order of a server: what `raywire serve` does.

    1. take the HTTP port                          (cli, before anything slow is imported)
    2. answer on it: 503, but for /live            (front: this process, or children of it)
    3. the model becomes a local folder
    4. place the ranks, and reserve what they need
    5. bind the wires; from here on all addresses are known, and the one deadline runs
    6. start the coordinator, then the engine cores
    7. all cores say READY to all API servers; serve

Stopping goes the other way: no new requests, running ones end, API servers, engine cores (which end
their workers), coordinator, reservation, folder. `library` does the same for an `LLM` object.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from api.config import ApiConfig
from api.engine_client import EngineClient
from cluster.access import access_config, tls_config
from cluster.addresses import IpcFolder, WireBinder, ipc_folder, sweep, wire_config
from cluster.api_server_process import ApiServerConfig
from cluster.api_servers import ApiServers
from cluster.config import EngineOptions, ResolvedModel, ServeConfig
from cluster.deadline import Deadline
from cluster.engine_group import EngineGroup
from cluster.environment import Environment
from cluster.estimate import check_cache
from cluster.front import Front, OnReady, OwnApiServer
from cluster.http_socket import url
from cluster.local_engines import LocalEngines
from cluster.model_source import resolve
from cluster.plan import Topology
from cluster.ray_engines import RayEngines
from cluster.ray_job import drain_s, stop_advice
from cluster.replacer import Replacer
from cluster.run_folder import kept_run, note_end
from cluster.waterfall import Waterfall, process_age_s
from engine import fingerprint, run_log
from engine.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, RaywireError
from engine.lifecycle import StopFlag, stop_on_signals
from engine.wire import EngineReady
from workers.model_shape import check_options
from workers.resources import available_cores
from workers.supported import check_model_folder, read_config

logger = logging.getLogger(__name__)

_EXECUTOR_SPEAKS_FIRST_S = 10.0
"""Workers that load too slowly are named by their executor, at --startup-timeout; the API server,
which knows less, gives it time to say so."""

_EXIT_CODE_S = 3.0
"""How long an engine core may take from its last words to its end, which is quicker."""

PATIENCE_S = 4.0
"""How long engine cores may take to end when they are asked to."""


def resolve_model(options: EngineOptions, variables: Environment) -> ResolvedModel:
    """Turn what the user named into a local folder that the workers can load as he asks.

    Raises:
        ConfigError: it cannot be found, downloaded, converted or loaded, or contradicts the
            options.
    """
    folder = resolve(options.model, cache_dir=variables.cache_dir)
    model_type = check_model_folder(folder)
    description = read_config(folder)
    check_options(
        description,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        max_model_len=None if options.max_model_len == "auto" else options.max_model_len,
    )
    check_cache(description, options)
    return ResolvedModel(name=options.model, path=folder, model_type=model_type)


def serve(
    config: ServeConfig, http_sockets: Sequence[socket.socket], *stop_signals: signal.Signals
) -> int:
    """Run a server until it is stopped or something that it needs dies. Main thread only.

    Args:
        config: what was asked for.
        http_sockets: one for each API server; they listen already (`http_socket.listen`).
        stop_signals: by default those that reach a whole process group.

    Returns:
        The exit code: 0 after a stop, 1 after a death.

    Raises:
        ConfigError: the settings, the model or this machine cannot work.
    """
    # torch makes this folder when it is imported, and would leave it in the temporary folder.
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", str(config.environment.cache_dir / "torchinductor")
    )
    with (
        stop_on_signals(*stop_signals) as stop,
        ipc_folder(config.environment.rpc_base_path) as folder,
    ):
        with kept_run(config, _title(config), lambda: server.last_seen):
            server = _Server(config, http_sockets, folder, stop)
            try:
                try:
                    code = server.front.run(server.start, stop)
                finally:
                    server.close(lambda: stop.count > 1)
                code = server.judge(code)
            except RaywireError as error:
                is_mistake = isinstance(error, ConfigError)
                note_end(EXIT_CONFIG if is_mistake else EXIT_FAILED, str(error))
                raise
            death = server.front.death
            note_end(code, cause="" if death is None else death.cause)
    return code


def _title(config: ServeConfig) -> str:
    """Of this process, in its log."""
    return "APIServer_0" if config.topology.num_api_servers == 1 else "raywire"


class _Server:
    """The parts of one server, and the order in which they start."""

    def __init__(
        self,
        config: ServeConfig,
        http_sockets: Sequence[socket.socket],
        folder: IpcFolder,
        stop: StopFlag,
    ) -> None:
        self._config = config
        self._folder = folder
        self._port = http_sockets[0].getsockname()[1]
        self._url = ""
        """Known once the node is."""
        self._waterfall = Waterfall(process_age_s())
        self._replacer = _make_replacer(config, stop)
        self.front = _make_front(config, http_sockets, self._on_ready, self._replacer)
        self._engines = _make_engines(config, self.front, self._replacer)
        if self._replacer is not None:
            self._replacer.attach(self.front, self._engines)

    def start(self) -> Path:
        """Everything up to the point where engine cores load. Returns the model's folder."""
        warn_about_cores(self._config.topology)
        if advice := stop_advice(self._config.shutdown_timeout, self._config.environment):
            logger.warning("%s", advice)
        model = resolve_model(self._config.engine, self._config.environment)
        self._waterfall.mark("resolve")
        # The port is taken long since. Said only now: above an error of the model, the line would
        # read as a success.
        logger.info(
            "listening on %s port %d; requests get 503 until the model is loaded",
            self._config.host,
            self._port,
        )
        reach = self._engines.place(model)
        deadline = Deadline(self._config.engine.startup_timeout)
        self._url = url(
            self._config.host,
            self._port,
            reach.address,
            is_tls=self._config.ssl_certfile is not None,
        )
        self._waterfall.mark("place")
        binder = WireBinder(self._folder, reach.host, self._config.wire_port_range)
        wires = [binder.api_server(i) for i in range(self._config.topology.num_api_servers)]
        self.front.bind(wires)
        keys = [each.public_key for each in wires if each.public_key is not None]
        coordinator = self._engines.start_coordinator(binder, keys, deadline)
        # On this node all run the same files.
        quantization = self._config.engine.quantization
        expected = None if reach.host is None else fingerprint.take(model.path, quantization)
        self.front.begin(model.path, coordinator, deadline, expected)
        replaces = self._config.on_engine_death == "replace"
        wire = wire_config(wires, coordinator, are_deaths_apart=replaces)
        self._engines.start(model, wire, self.front.allow, deadline)
        self._engines.watch()
        return model.path

    def close(self, is_urgent: Callable[[], bool]) -> None:
        """End the engine cores. Those that load have workers deep in an import or a file, which are
        not waited for: they die with them. One that hangs will not hear us."""
        loading: list[int] = []
        if self._replacer is not None:
            self._replacer.close()
            loading = self._replacer.loading
        heeds_stop = self.front.heeds_stop
        if self.front.death is not None and not heeds_stop:
            self._await_exit_code(is_urgent)
        self._engines.close(PATIENCE_S if heeds_stop else 0.0, is_urgent, loading)
        sweep(self._folder.path.parent)  # a core that had to be killed may have left its own

    @property
    def last_seen(self) -> list[str]:
        """What each engine core was doing when it was last heard of."""
        return [self.front.last_seen(i) for i in range(self._config.topology.num_engines)]

    def _await_exit_code(self, is_urgent: Callable[[], bool]) -> None:
        """A core that cannot start says so before it ends its workers, and its exit code says
        whose mistake it is: it would be lost if we killed it in between."""
        deadline = time.monotonic() + _EXIT_CODE_S
        while all(code is None for code in self._engines.exit_codes) and not is_urgent():
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)

    def judge(self, code: int) -> int:
        """The exit code, or a mistake of the user's as such."""
        death = self.front.death
        if death is not None and EXIT_CONFIG in self._engines.exit_codes:
            raise ConfigError(death.cause)
        return code

    def _on_ready(self, all_ready: Sequence[EngineReady], handshake_s: float) -> None:
        """Requests are served. Nobody needs the sockets' names any more, unless engine cores may
        come later; and the log gets the start-up times and the address."""
        if self._replacer is None:
            self._folder.remove()
        else:
            self._engines.keep_sizes(all_ready)
            self._replacer.serve()
        slowest = max(all_ready, key=lambda ready: ready.load_s)
        stages = {
            "model_code": slowest.imports_s,
            "weights": slowest.weights_s,
            "kernels": slowest.kernels_s,
            "warm_up": slowest.kv_cache_s,
        }
        workers_s = slowest.load_s - sum(stages.values())
        stages = {"workers": workers_s, **stages, "handshake": handshake_s}
        self._waterfall.mark_chain("spawn", stages)
        logger.info("ready total=%.1fs %s", self._waterfall.total_s, self._waterfall)
        logger.info("serving at %s", self._url)


# -------------------------------------------------------------------------------------- the parts


def _make_replacer(config: ServeConfig, stop: StopFlag) -> Replacer | None:
    if config.on_engine_death == "exit":
        return None
    return Replacer(
        config.topology.num_engines,
        first_rank=config.ranks.start,
        start_timeout_s=config.engine.startup_timeout + _EXECUTOR_SPEAKS_FIRST_S,
        is_draining=lambda: stop.is_set,
    )


def _make_front(
    config: ServeConfig,
    http_sockets: Sequence[socket.socket],
    on_ready: OnReady,
    replacer: Replacer | None,
) -> Front:
    num_servers = len(http_sockets)
    api = ApiConfig(
        served_model_names=config.served_model_name or (config.engine.model,),
        shutdown_timeout_s=drain_s(config.shutdown_timeout, config.environment),
        start_timeout_s=config.engine.startup_timeout + _EXECUTOR_SPEAKS_FIRST_S,
        scheduling_policy=config.engine.scheduling_policy,
        chat_template=config.chat_template,
        generation_config=config.generation_config,
        override_generation_config=config.override_generation_config or {},
        trust_request_chat_template=config.trust_request_chat_template,
        return_tokens_as_token_ids=config.return_tokens_as_token_ids,
        tool_call_parser=config.tool_call_parser if config.enable_auto_tool_choice else None,
        reasoning_parser=config.reasoning_parser,
        first_rank=config.ranks.start,
        max_n=config.max_n,
        max_stored_responses=config.max_stored_responses,
        send_timeout_s=config.send_timeout,
        max_num_queued_reqs=_share(config.queue_limit, num_servers),
        max_num_queued_tokens=_share(config.max_num_queued_tokens, num_servers),
        allowed_origins=config.allowed_origins,
        allowed_methods=config.allowed_methods,
        allowed_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        access=access_config(config),
        tls=tls_config(config),
        profile_dir=str(config.environment.cache_dir / "profiles"),
        root_path=config.root_path,
        has_docs=not config.disable_fastapi_docs,
    )
    step_timeout_s = config.environment.execute_model_timeout_s
    if len(http_sockets) == 1:
        client = EngineClient(
            config.topology.num_engines,
            step_timeout_s=step_timeout_s,
            first_rank=api.first_rank,
            replaces_ranks=replacer is not None,
        )
        return OwnApiServer(api, http_sockets[0], client, on_ready, replacer)
    configs = [
        ApiServerConfig(
            api=api,
            client_index=index,
            num_engines=config.topology.num_engines,
            step_timeout_s=step_timeout_s,
            log_level=config.log_level,
            replaces_ranks=replacer is not None,
            run_folder=run_log.folder(),
        )
        for index in range(len(http_sockets))
    ]
    return ApiServers(configs, http_sockets, on_ready, replacer)


def _share(limit: int | None, num_servers: int) -> int | None:
    """What each of several API servers has of a limit of all. The kernel spreads connections
    evenly, and a connection has one request at a time; so none needs what another has left, and
    nobody has to be asked."""
    return None if limit is None else -(-limit // num_servers)


def _make_engines(config: ServeConfig, front: Front, replacer: Replacer | None) -> EngineGroup:
    back_end = RayEngines if config.backend == "ray" else LocalEngines
    if replacer is not None:
        return back_end(config, replacer.on_death, replacer.has_said_why, front.last_seen)
    return back_end(
        config,
        lambda index, _, cause: front.mark_dead(index, cause),
        lambda *_: front.death is not None,
        front.last_seen,
    )


def warn_about_cores(topology: Topology) -> None:
    """Say once that this machine has fewer cores than the processes want."""
    available = available_cores()
    if available < topology.min_vcpus:
        logger.warning(
            "%d processes want %d vCPUs and this machine has %d: they will wait for each other;"
            " `raywire plan` explains",
            topology.num_processes,
            topology.min_vcpus,
            available,
        )
