"""The process formula and the table that shows it."""

import pytest

from cluster.plan import STANDARD_DEPLOYMENTS, Topology, table
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("topology", "counts", "min_vcpus"),
    [
        (Topology(), (1, 1, 1, 0), 6),
        (Topology(tensor_parallel_size=4), (1, 1, 4, 0), 12),
        (Topology(tensor_parallel_size=2, data_parallel_size=4), (4, 4, 8, 1), 34),
        (Topology(data_parallel_size=8), (8, 8, 8, 1), 50),
        (Topology(data_parallel_size=8, api_server_count=2), (2, 8, 8, 1), 38),
        (Topology(tensor_parallel_size=8, data_parallel_size=2), (2, 2, 16, 1), 42),
        (Topology(tensor_parallel_size=2, pipeline_parallel_size=2), (1, 1, 4, 0), 12),
    ],
)
def test_processes_follow_the_formula(
    topology: Topology, counts: tuple[int, int, int, int], min_vcpus: int
) -> None:
    """A + DP + DP * PP * TP + (1 if DP > 1 else 0) processes, and two vCPUs for each."""
    assert counts == (
        topology.num_api_servers,
        topology.num_engines,
        topology.num_workers,
        topology.num_coordinators,
    )
    assert topology.num_processes == sum(counts)
    assert topology.min_vcpus == min_vcpus


def test_there_is_a_title_for_each_process() -> None:
    """What the plan counts is what `ps` will show."""
    topology = Topology(tensor_parallel_size=2, pipeline_parallel_size=2)

    assert topology.titles() == [
        "RAYWIRE::APIServer_0",
        "RAYWIRE::EngineCore_DP0",
        "RAYWIRE::Worker_DP0_PP0_TP0",
        "RAYWIRE::Worker_DP0_PP0_TP1",
        "RAYWIRE::Worker_DP0_PP1_TP0",
        "RAYWIRE::Worker_DP0_PP1_TP1",
    ]
    for standard in STANDARD_DEPLOYMENTS:
        assert len(standard.titles()) == standard.num_processes


def test_the_table_has_a_row_for_each_deployment() -> None:
    """Columns line up, whatever the names are."""
    lines = table(STANDARD_DEPLOYMENTS).splitlines()

    assert len(lines) == 1 + len(STANDARD_DEPLOYMENTS)
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[-2:] == ["min", "vCPUs"]
    assert lines[3].split()[-6:] == ["4", "4", "8", "1", "17", "34"]


def test_a_size_below_one_is_refused_by_its_flag() -> None:
    """The message names what the user wrote."""
    with pytest.raises(ConfigError, match="--api-server-count must be at least 1, not 0"):
        Topology(api_server_count=0)
