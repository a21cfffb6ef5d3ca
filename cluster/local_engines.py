"""Engine cores as child processes of the command: the back end `mp`, which needs no cluster.

Implements `engine_group.EngineGroup`. The coordinator, where there is one, is a child as well.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence

from cluster import local_node
from cluster.addresses import WireBinder
from cluster.config import ResolvedModel, ServeConfig
from cluster.coordinator_process import CoordinatorConfig
from cluster.coordinator_process import main as coordinator_main
from cluster.deadline import Deadline
from cluster.engine_group import Reach, successor
from cluster.placement import PlacementError, place
from cluster.supervisor import Child, Supervisor
from engine import run_log
from engine.config import CoordinatorAddresses, EngineConfig, WireConfig
from engine.errors import ConfigError
from engine.process import main as engine_main
from engine.wire import EngineReady
from workers.executor import start_executor
from workers.supported import SCRIPTED


def engine_child(config: EngineConfig, *, leads_group: bool = False) -> Child:
    """One engine core as a process to start."""
    return Child(
        kind="engine core",
        title=f"EngineCore_DP{config.parallel.data_parallel_rank}",
        main=engine_main,
        arguments=(config, start_executor),
        epoch=config.wire.epoch,
        leads_group=leads_group,
    )


class LocalEngines:
    """The engine cores of one server on this node.

    Args:
        config: what was asked for.
        on_death, has_said_why, last_seen: see `engine_group.EngineGroup`.
    """

    def __init__(
        self,
        config: ServeConfig,
        on_death: Callable[[int | None, int, str], None],
        has_said_why: Callable[[int | None, int], bool],
        last_seen: Callable[[int], str] = lambda _: "",
    ) -> None:
        self._config = config
        self._replaces = config.on_engine_death == "replace"
        self._last_seen = last_seen
        self._supervisor = Supervisor(
            lambda number, epoch, cause: on_death(self._index(number), epoch, cause),
            lambda number, epoch: has_said_why(self._index(number), epoch),
            self._last_seen_child,
            are_deaths_apart=self._replaces,
        )
        self._coordinators: list[Child] = []
        """Children that come before the engine cores."""
        self._engines: list[EngineConfig] = []
        self._ready: dict[int, EngineReady] = {}
        """What the first ones said, by index."""

    def place(self, model: ResolvedModel) -> Reach:
        """All ranks of this server run here. Too few GPUs show now, not when workers have loaded
        torch. Where the driver shows none, it is for the workers to look."""
        config = self._config
        node = local_node.observe(config.environment.cuda_visible_devices)
        if node.total.gpus:
            demand = local_node.demand_here(
                [node],
                config.engine.world_size,
                device=config.engine.device,
                is_scripted=model.model_type == SCRIPTED,
            )
            num_ranks, local = len(config.ranks), config.data_parallel_size_local
            try:
                place([node], demand, num_ranks, config.strategy, local)
            except PlacementError as error:
                raise ConfigError(f"{error}; --device cpu does without GPUs") from error
        return Reach()

    def start_coordinator(
        self, binder: WireBinder, api_server_keys: Sequence[bytes], deadline: Deadline
    ) -> CoordinatorAddresses | None:
        if not self._config.topology.num_coordinators:
            return None
        wires = binder.coordinator()
        config = CoordinatorConfig(
            wires=wires,
            num_engines=self._config.topology.num_engines,
            first_rank=self._config.ranks.start,
            log_level=self._config.log_level,
            run_folder=run_log.folder(),
        )
        child = Child(
            kind="coordinator",
            title="DPCoordinator",
            main=coordinator_main,
            arguments=(config,),
        )
        self._supervisor.start([child], "spawn")
        self._coordinators.append(child)
        wires.close()
        return wires.addresses

    def start(
        self,
        model: ResolvedModel,
        wire: WireConfig,
        allow: Callable[[Sequence[bytes]], None],
        deadline: Deadline,
    ) -> None:
        # Nothing here waits: each core counts the whole --startup-timeout for itself.
        config = self._config
        self._engines = config.engine.engine_configs(
            model, wire, config.environment, config.log_level, config.ranks
        )
        self._supervisor.start([self._child(each) for each in self._engines], "spawn")

    def _child(self, config: EngineConfig) -> Child:
        return engine_child(config, leads_group=self._replaces)

    def keep_sizes(self, all_ready: Sequence[EngineReady]) -> None:
        self._ready = {ready.engine_index: ready for ready in all_ready}

    def node_of(self, engine_index: int) -> str | None:
        return None

    def restart(self, engine_index: int, epoch: int) -> None:
        config = successor(self._engines[engine_index], epoch, self._ready.get(engine_index))
        number = len(self._coordinators) + engine_index
        self._supervisor.restart(number, self._child(config), "spawn")

    def restart_coordinator(self, epoch: int) -> None:
        [first] = self._coordinators
        [config] = first.arguments
        assert isinstance(config, CoordinatorConfig)
        config = dataclasses.replace(config, is_successor=True)
        child = dataclasses.replace(first, arguments=(config,), epoch=epoch)
        self._supervisor.restart(0, child, "spawn")

    def watch(self) -> None:
        self._supervisor.watch()

    def close(
        self,
        patience_s: float,
        is_urgent: Callable[[], bool] = lambda: False,
        loading: Collection[int] = (),
    ) -> None:
        num_before = len(self._coordinators)
        self._supervisor.close(patience_s, is_urgent, [num_before + rank for rank in loading])

    @property
    def exit_codes(self) -> list[int | None]:
        return self._supervisor.exit_codes[len(self._coordinators) :]

    def _index(self, number: int) -> int | None:
        """Which engine core a child is; None is the coordinator."""
        index = number - len(self._coordinators)
        return None if index < 0 else index

    def _last_seen_child(self, number: int) -> str:
        """Nobody listens to the coordinator's heart."""
        index = self._index(number)
        return "" if index is None else self._last_seen(index)
