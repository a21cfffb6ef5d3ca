"""What a topology needs: processes and cores. Pure; for `raywire plan` and `serve`'s warning.

    processes = A + DP + DP * PP * TP + (1 if DP > 1 else 0)        A defaults to DP

Two vCPUs (one physical core) for each process: API servers work on text and engine cores schedule
while the workers compute, and a worker that waits for a core makes its whole group wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.text_table import aligned
from engine.errors import ConfigError

VCPUS_PER_PROCESS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The sizes of one server, and the processes that follow from them."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_start_rank: int = 0
    """Above 0 where other servers have the ranks before it (hybrid and external balancing)."""

    api_server_count: int | None = None
    """None: as many as data-parallel ranks."""

    name: str = ""
    """How the table calls it; empty: its flags."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
            ("--data-parallel-size", self.data_parallel_size),
            ("--api-server-count", self.num_api_servers),
        ):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, not {value}")

    @property
    def num_api_servers(self) -> int:
        return self.data_parallel_size if self.api_server_count is None else self.api_server_count

    @property
    def num_engines(self) -> int:
        return self.data_parallel_size

    @property
    def ranks(self) -> range:
        first = self.data_parallel_start_rank
        return range(first, first + self.data_parallel_size)

    @property
    def workers_per_engine(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_workers(self) -> int:
        return self.num_engines * self.workers_per_engine

    @property
    def num_coordinators(self) -> int:
        return 1 if self.data_parallel_size > 1 else 0

    @property
    def num_processes(self) -> int:
        return self.num_api_servers + self.num_engines + self.num_workers + self.num_coordinators

    @property
    def min_vcpus(self) -> int:
        return VCPUS_PER_PROCESS * self.num_processes

    @property
    def flags(self) -> str:
        """The command line's flags for it: `-tp 2 -dp 4`; empty for one device."""
        sizes = [
            ("-tp", self.tensor_parallel_size),
            ("-pp", self.pipeline_parallel_size),
            ("-dp", self.data_parallel_size),
        ]
        flags = [f"{flag} {size}" for flag, size in sizes if size > 1]
        if self.num_api_servers != self.data_parallel_size:
            flags.append(f"--api-server-count {self.num_api_servers}")
        return " ".join(flags)

    @property
    def label(self) -> str:
        return self.name or self.flags or "1 device"

    def titles(self) -> list[str]:
        """The title of every process, as `ps` shows it."""
        return [
            *(f"RAYWIRE::APIServer_{i}" for i in range(self.num_api_servers)),
            *(f"RAYWIRE::EngineCore_DP{dp}" for dp in self.ranks),
            *(
                f"RAYWIRE::Worker_DP{dp}_PP{pp}_TP{tp}"
                for dp in self.ranks
                for pp in range(self.pipeline_parallel_size)
                for tp in range(self.tensor_parallel_size)
            ),
            *("RAYWIRE::DPCoordinator" for _ in range(self.num_coordinators)),
        ]

    def to_json(self) -> dict[str, object]:
        """The row for machines."""
        return {
            "name": self.label,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "data_parallel_size": self.data_parallel_size,
            "api_servers": self.num_api_servers,
            "engines": self.num_engines,
            "workers": self.num_workers,
            "coordinators": self.num_coordinators,
            "processes": self.num_processes,
            "min_vcpus": self.min_vcpus,
        }


STANDARD_DEPLOYMENTS = (
    Topology(name="1 GPU"),
    Topology(name="4 GPUs, one big model (-tp 4)", tensor_parallel_size=4),
    Topology(name="8 GPUs, -tp 2 -dp 4", tensor_parallel_size=2, data_parallel_size=4),
    Topology(name="8 GPUs, 8 replicas (-dp 8)", data_parallel_size=8),
    Topology(name="8 GPUs, -dp 8, 2 API servers", data_parallel_size=8, api_server_count=2),
)

_COLUMNS = ("deployment", "API servers", "engines", "workers", "coordinator", "total", "min vCPUs")


def table(topologies: Sequence[Topology]) -> str:
    """The topologies as a table for people."""
    rows = [_COLUMNS, *(_row(topology) for topology in topologies)]
    return "\n".join(aligned(rows))


def _row(t: Topology) -> tuple[str, ...]:
    numbers = (
        t.num_api_servers,
        t.num_engines,
        t.num_workers,
        t.num_coordinators,
        t.num_processes,
        t.min_vcpus,
    )
    return (t.label, *(str(n) for n in numbers))
