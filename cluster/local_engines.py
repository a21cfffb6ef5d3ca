"""Engine cores as child processes of the command: the back end `mp`, which needs no cluster.

Implements `engine_group.EngineGroup`. The coordinator, where there is one, is a child as well.
"""

from collections.abc import Callable, Sequence

from cluster import local_node
from cluster.addresses import WireBinder
from cluster.config import ResolvedModel, ServeConfig
from cluster.coordinator_process import CoordinatorConfig
from cluster.coordinator_process import main as coordinator_main
from cluster.deadline import Deadline
from cluster.engine_group import Reach
from cluster.placement import PlacementError, place
from cluster.supervisor import Child, Supervisor
from engine.config import CoordinatorAddresses, EngineConfig, WireConfig
from engine.errors import ConfigError
from engine.process import main as engine_main
from workers.executor import start_executor
from workers.supported import SCRIPTED


def engine_child(config: EngineConfig) -> Child:
    """One engine core as a process to start."""
    return Child(
        kind="engine core",
        title=f"EngineCore_DP{config.parallel.data_parallel_rank}",
        main=engine_main,
        arguments=(config, start_executor),
    )


class LocalEngines:
    """The engine cores of one server on this node.

    Args:
        config: what was asked for.
        on_death: called once per dead core with its index and the cause, from a thread.
        has_said_why: whether the first cause of the server's end is in the log already.
    """

    def __init__(
        self,
        config: ServeConfig,
        on_death: Callable[[int | None, str], None],
        has_said_why: Callable[[], bool],
    ) -> None:
        self._config = config
        self._on_death = on_death
        self._supervisor = Supervisor(self._on_child_death, lambda _: has_said_why())
        self._num_coordinators = 0
        """Children that come before the engine cores."""

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
        )
        child = Child(
            kind="coordinator",
            title="DPCoordinator",
            main=coordinator_main,
            arguments=(config,),
        )
        self._supervisor.start([child], "spawn")
        self._num_coordinators = 1
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
        configs = config.engine.engine_configs(
            model, wire, config.environment, config.log_level, config.ranks
        )
        self._supervisor.start([engine_child(each) for each in configs], "spawn")

    def watch(self) -> None:
        self._supervisor.watch()

    def close(self, patience_s: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        self._supervisor.close(patience_s, is_urgent)

    @property
    def exit_codes(self) -> list[int | None]:
        return self._supervisor.exit_codes[self._num_coordinators :]

    def _on_child_death(self, index: int, cause: str) -> None:
        is_coordinator = index < self._num_coordinators
        self._on_death(None if is_coordinator else index - self._num_coordinators, cause)
