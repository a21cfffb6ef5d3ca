"""Engine cores as child processes of the command: the back end `mp`, which needs no cluster.

Implements `engine_group.EngineGroup`. The coordinator, where there is one, is a child as well.
"""

from collections.abc import Callable, Sequence

from cluster.config import ResolvedModel, ServeConfig
from cluster.engine_group import Reach
from cluster.supervisor import Child, Supervisor
from engine.config import CoordinatorAddresses, EngineConfig, WireConfig
from engine.process import main as engine_main
from workers.executor import start_executor


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
        on_death: called once per dead core with its rank and the cause, from a thread.
        has_said_why: whether the first cause of the server's end is in the log already.
    """

    def __init__(
        self,
        config: ServeConfig,
        on_death: Callable[[int | None, str], None],
        has_said_why: Callable[[], bool],
    ) -> None:
        self._config = config
        self._supervisor = Supervisor(on_death, lambda _: has_said_why())

    def place(self) -> Reach:
        """All ranks of this server run here."""
        return Reach()

    def start_coordinator(self, num_api_servers: int) -> CoordinatorAddresses | None:
        return None

    def start(
        self,
        model: ResolvedModel,
        wire: WireConfig,
        allow: Callable[[Sequence[bytes]], None],
    ) -> None:
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
        return self._supervisor.exit_codes
