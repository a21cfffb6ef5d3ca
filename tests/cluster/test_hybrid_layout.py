"""The dry run of hybrid balancing on a Ray cluster: all servers in one layout."""

import dataclasses
import json
from typing import Any

import pytest

from cluster.hybrid_layout import lay_out_servers
from cluster.layout import Layout
from cluster.layout_text import render
from cluster.placement import Node, Resources
from engine.errors import ConfigError
from tests.cluster.test_layout import GIB, MODEL, SCRIPTED, make_config, make_node


def lay_out_hybrid(*nodes: Node, facts: Any = MODEL, tp: int = 1, **settings: Any) -> Layout:
    config = make_config(
        engine={"data_parallel_size": 4, "tensor_parallel_size": tp},
        data_parallel_backend="ray",
        data_parallel_hybrid_lb=True,
        data_parallel_size_local=2,
        **settings,
    )
    return lay_out_servers(config, nodes, facts)


def test_every_node_has_a_server_with_its_ranks() -> None:
    """Numbered over all nodes; whole servers are placed, so one node with room for all is not
    enough."""
    layout = lay_out_hybrid(make_node("b"), make_node("a"), tp=2)

    assert [(r.rank, r.node_id[0], r.local_rank) for r in layout.ranks] == [
        (0, "a", 0),
        (1, "a", 1),
        (2, "b", 0),
        (3, "b", 1),
    ]
    assert [(s.title, s.node_id[0], s.first_rank, s.url) for s in layout.servers] == [
        ("ray::NodeServer_DP0", "a", 0, "http://10.77.0.97:8000"),
        ("ray::NodeServer_DP2", "b", 2, "http://10.77.0.98:8000"),
    ]
    with pytest.raises(ConfigError, match=r"strict, 1 a node"):
        lay_out_hybrid(make_node("a"))


def test_servers_are_processes_of_their_nodes() -> None:
    """Each with its own API servers and coordinator, children rather than actors; and nothing
    leaves a node."""
    layout = lay_out_hybrid(make_node("a"), make_node("b"), api_server_count=1)

    on_b = [p.title for p in layout.processes if p.node_id[0] == "b"]
    assert on_b == [
        "RAYWIRE::APIServer_0",
        "RAYWIRE::DPCoordinator",
        "RAYWIRE::EngineCore_DP2",
        "RAYWIRE::Worker_DP2_PP0_TP0",
        "RAYWIRE::EngineCore_DP3",
        "RAYWIRE::Worker_DP3_PP0_TP0",
    ]
    assert layout.formula == "2 × (1 + 2 + 2 × 1 × 1 + 1) = 12"
    assert (len(layout.processes), layout.min_vcpus) == (12, 24)
    assert {w.address for w in layout.wires if w.kind != "HTTP"} == {"ipc"}


def test_a_node_reserves_for_its_whole_server() -> None:
    """As `hybrid` does: the GPUs of all its ranks and one CPU; the command's node need not be among
    those that are used."""
    layout = lay_out_hybrid(
        make_node("a"), make_node("b", gpus=4), make_node("c", gpus=8), facts=SCRIPTED, tp=2
    )

    assert [(n.node_id[0], n.reserved_gpus, n.reserved_cpus) for n in layout.nodes] == [
        ("b", 4, 1),
        ("c", 4, 1),
    ]
    assert not any(node.is_driver for node in layout.nodes)


def test_busy_nodes_are_refused_with_how_long_serve_would_wait() -> None:
    """Room for a rank is no room for a server."""
    busy = dataclasses.replace(make_node("b"), available=Resources(cpus=1, memory_bytes=GIB))

    with pytest.raises(ConfigError, match="would wait 300 s for it"):
        lay_out_hybrid(make_node("a"), busy)


def test_memory_is_rays_count_of_it() -> None:
    """So what does not fit is a warning that names the node, and the start will tell."""
    layout = lay_out_hybrid(make_node("a"), make_node("b", gib=1.5))

    refusals = [line for line in layout.warnings if "by Ray's count" in line]
    assert {line[0] for line in refusals} == {"b"}


def test_people_and_machines_see_all_servers() -> None:
    """A section of its own, above the ranks."""
    layout = lay_out_hybrid(make_node("a"), make_node("b"))

    text = render(layout)
    assert "m -dp 4 --data-parallel-size-local 2 --data-parallel-hybrid-lb, bfloat16:" in text
    assert "ray::NodeServer_DP2  bbbbbbbb  2-3    http://10.77.0.98:8000" in text
    assert [s["first_rank"] for s in json.loads(json.dumps(layout.to_json()))["servers"]] == [0, 2]
