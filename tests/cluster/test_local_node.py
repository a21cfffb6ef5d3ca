"""This machine as a node."""

import pytest

from cluster import local_node
from workers import resources


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,3", 2),
        ("0,-1,2", 1),
        ("GPU-8932f937", 1),
        ("0,1,2,3,4,5", 4),
    ],
)
def test_gpus_are_those_that_cuda_shows(variable: str | None, expected: int) -> None:
    """CUDA_VISIBLE_DEVICES names them, up to the first that is none; never more than there are."""
    assert local_node.num_visible(variable, 4) == expected


def test_this_machine_has_what_its_processes_may_use() -> None:
    """Cores and memory within the limits of our control group; no GPU where none is visible."""
    node = local_node.observe("")

    assert node.is_driver
    assert node.is_alive
    assert node.total.cpus == resources.available_cores()
    assert node.total.gpus == 0
    assert 0 < node.available.memory_bytes <= node.total.memory_bytes == resources.total_memory()
