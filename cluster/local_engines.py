"""Engine cores as child processes of the command: the back end `mp`, which needs no cluster.

Implements `engine_group.EngineGroup`. The coordinator, where there is one, is a child as well.
"""

from cluster.supervisor import Child
from engine.config import EngineConfig
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
