"""The dry run: what a layout consists of, and which ones are refused."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config import EngineOptions, ServeConfig
from cluster.dry_run import read_facts
from cluster.environment import Environment
from cluster.estimate import ModelFacts
from cluster.layout import Layout
from cluster.layout_builder import lay_out
from cluster.layout_text import render, size
from cluster.placement import Node, PlacementError, Resources
from engine.errors import ConfigError
from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import ROOT
from workers.executor import BROADCAST_CHUNKS
from workers.model_shape import read_shape
from workers.ring import Ring
from workers.worker_handle import RESPONSE_CHUNKS

GIB, MIB = 1 << 30, 1 << 20

_SHAPE = read_shape({"model_type": "llama", "num_hidden_layers": 4, "torch_dtype": "bfloat16"})
MODEL = ModelFacts(
    shape=_SHAPE,
    tensors={
        "model.embed_tokens.weight": (32000, 4096),
        "lm_head.weight": (32000, 4096),
        **{f"model.layers.{i}.mlp.up_proj.weight": (11008, 4096) for i in range(4)},
    },
    max_len=2048,
)
SCRIPTED = ModelFacts(shape=None, tensors={}, max_len=32768)


def make_node(name: str, *, cpus: float = 64, gpus: float = 0, gib: float = 64) -> Node:
    resources = Resources(cpus=cpus, gpus=gpus, memory_bytes=int(gib * GIB))
    return Node(
        node_id=name * 8,
        address=f"10.77.0.{ord(name)}",
        total=resources,
        available=resources,
        is_driver=name == "a",
    )


HERE = make_node("a")


def make_config(*, engine: dict[str, Any] | None = None, **settings: Any) -> ServeConfig:
    options = EngineOptions(model="m", **engine or {})
    return ServeConfig(engine=options, **settings)


def dp(ranks: int, tp: int = 1) -> dict[str, Any]:
    return {"data_parallel_size": ranks, "tensor_parallel_size": tp}


def on_two_nodes(**settings: Any) -> Layout:
    config = make_config(
        engine=dp(2, tp=2),
        data_parallel_backend="ray",
        data_parallel_placement="spread",
        **settings,
    )
    return lay_out(config, [make_node("b", gpus=8), make_node("a", gpus=2)], MODEL)


def test_processes_are_those_of_the_formula() -> None:
    """Each on its node, and titled as `ps` will show it; engine cores and coordinator are actors
    under Ray."""
    layout = on_two_nodes(api_server_count=1)

    assert [(p.title, p.node_id[0]) for p in layout.processes] == [
        ("RAYWIRE::APIServer_0", "a"),
        ("ray::DPCoordinator", "a"),
        ("ray::EngineCore_DP0", "a"),
        ("RAYWIRE::Worker_DP0_PP0_TP0", "a"),
        ("RAYWIRE::Worker_DP0_PP0_TP1", "a"),
        ("ray::EngineCore_DP1", "b"),
        ("RAYWIRE::Worker_DP1_PP0_TP0", "b"),
        ("RAYWIRE::Worker_DP1_PP0_TP1", "b"),
    ]
    assert layout.formula == "1 + 2 + 2 × 1 × 2 + 1 = 8"
    assert layout.min_vcpus == 16


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 2, 1), (3, 2, 2, 2), (4, 2, 1, 4)])
def test_titles_are_the_topologys(sizes: tuple[int, int, int, int]) -> None:
    """Without Ray, whatever the sizes: `plan` with and without a model agree."""
    config = make_config(
        engine={
            "data_parallel_size": sizes[0],
            "pipeline_parallel_size": sizes[1],
            "tensor_parallel_size": sizes[2],
        },
        api_server_count=sizes[3],
    )

    layout = lay_out(config, [HERE], SCRIPTED)

    assert sorted(p.title for p in layout.processes) == sorted(config.topology.titles())


def test_ranks_have_nodes_and_devices() -> None:
    """The placement, with the global number of each rank."""
    config = make_config(
        engine=dp(4, tp=2),
        data_parallel_hybrid_lb=True,
        data_parallel_size_local=2,
        data_parallel_start_rank=2,
    )

    layout = lay_out(config, [make_node("a", gpus=4)], MODEL)

    assert [(r.rank, r.local_rank, r.devices) for r in layout.ranks] == [
        (2, 0, (0, 1)),
        (3, 1, (2, 3)),
    ]


def test_wires_are_ipc_on_one_node_and_encrypted_between_nodes() -> None:
    """Of API servers and coordinator; those inside an engine core never leave its node."""
    local = lay_out(make_config(engine=dp(2, tp=2)), [HERE], MODEL)
    assert {w.address for w in local.wires if w.kind not in ("HTTP", "collectives")} == {"ipc"}
    assert [w.address for w in local.wires if w.kind == "collectives"] == ["gloo, loopback"] * 2

    layout = on_two_nodes(wire_port_range=(29500, 29506))
    tcp = "tcp 10.77.0.97 ports 29500-29506, encrypted"
    assert {w.kind for w in layout.wires if w.address == tcp} == {
        *("requests", "outputs", "waves", "statistics", "load reports")
    }
    assert {w.address for w in layout.wires if w.kind.startswith("large")} == {"ipc"}
    [requests, _] = [w for w in layout.wires if w.kind == "requests"]
    assert requests.binds == "RAYWIRE::APIServer_0"
    assert requests.connects == ("ray::EngineCore_DP0", "ray::EngineCore_DP1")


def test_segments_are_as_large_as_the_real_ones() -> None:
    """A broadcast ring for each engine core and a response ring for each worker, to the byte."""
    environment = Environment(mq_max_chunk_bytes=1 * MIB)
    config = make_config(engine=dp(1, tp=2), environment=environment)

    calls, *replies = lay_out(config, [HERE], MODEL).segments

    real = Ring.create(num_chunks=BROADCAST_CHUNKS, chunk_bytes=MIB, num_readers=2)
    assert calls.num_bytes == len(real.memory.bytes)
    real.close()
    real = Ring.create(num_chunks=RESPONSE_CHUNKS, chunk_bytes=MIB, num_readers=1)
    assert [reply.num_bytes for reply in replies] == [len(real.memory.bytes)] * 2
    real.close()


def test_chunks_shrink_where_there_is_little_memory() -> None:
    """As the executor will make them, with a warning."""
    layout = lay_out(make_config(), [make_node("a", gib=0.5)], SCRIPTED)

    assert {segment.chunk_bytes for segment in layout.segments} == {
        512 * MIB // 4 // 14 // 4096 * 4096
    }
    assert any("ring chunks shrink from 16.0 to 9.1 MiB" in line for line in layout.warnings)


def test_a_node_is_asked_for_cores_and_memory() -> None:
    """Two vCPUs for each process there; what Ray takes off its count beside it; weights, KV cache
    and rings in its memory, or in that of its GPUs."""
    layout = lay_out(make_config(engine=dp(2)), [make_node("a", cpus=8)], MODEL)
    [load] = layout.nodes
    [first, _] = layout.ranks
    assert first.need is not None
    assert first.need.kv_cache_bytes == GIB // 2
    assert first.need.weight_bytes == 2 * (2 * 32000 + 4 * 11008) * 4096
    assert first.need.kv_bytes_per_token == 2 * 32 * 128 * 2 * 4
    rings = sum(segment.num_bytes for segment in layout.segments)
    assert load.memory_asked == rings + 2 * (first.need.weight_bytes + GIB // 2)
    assert (load.num_processes, load.vcpus_asked, load.reserved_cpus) == (7, 14, 0)
    assert any("7 processes want 14 vCPUs, and there are 8" in line for line in layout.warnings)

    [here, there] = on_two_nodes().nodes
    assert (here.reserved_gpus, here.reserved_cpus) == (2, 1)
    assert here.vcpus_asked == 2 * (2 + 1 + 3)
    assert there.vcpus_asked == 2 * 3
    assert there.memory_asked == (10 + 2 * 4) * 16 * MIB + 10 * 3 + 2 + 2 * (4 * 2 + 2)


def test_the_nodes_of_a_layout_include_the_commands_own() -> None:
    """Though no rank is there: its API servers are."""
    config = make_config(data_parallel_backend="ray")

    layout = lay_out(config, [make_node("a", cpus=0), make_node("b")], SCRIPTED)

    assert [(node.node_id[0], node.num_ranks) for node in layout.nodes] == [("a", 0), ("b", 1)]


def test_a_model_that_is_not_here_is_unknown() -> None:
    """Everything but memory is told all the same."""
    layout = lay_out(make_config(), [HERE], None)

    assert layout.ranks[0].need is None
    assert layout.nodes[0].memory_asked is None
    assert "unknown before the model is on this machine" in render(layout)


def test_a_shorter_length_is_a_warning() -> None:
    """What serve would shorten by itself."""
    config = make_config(engine={"kv_cache_memory_bytes": None})

    layout = lay_out(config, [make_node("a", gib=2)], dataclasses.replace(MODEL, max_len=131072))

    assert any("instead of the model's 131072" in line for line in layout.warnings)


@pytest.mark.parametrize(
    ("config", "node", "words"),
    [
        (make_config(engine=dp(1, tp=17)), HERE, "17 workers in one engine core"),
        (make_config(engine=dp(8)), make_node("a", gib=4), "the model's weights need 0.82 GiB on"),
        (make_config(), make_node("a", gib=0.01), "the rings between engine core and workers need"),
        (make_config(engine={"kv_cache_memory_bytes": MIB}), HERE, "tokens needs"),
        (
            make_config(engine={"device": "cuda"}),
            HERE,
            "No node has a GPU: add some, or use --device cpu",
        ),
    ],
)
def test_what_a_start_would_refuse_is_refused(config: ServeConfig, node: Node, words: str) -> None:
    """In the words of whoever would."""
    with pytest.raises(ConfigError, match=words):
        lay_out(config, [node], MODEL)


def test_too_few_ports_are_refused() -> None:
    """Two for each API server and three for the coordinator, if any wire leaves the node."""
    with pytest.raises(ConfigError, match=r"has 6 ports, and 2 API servers .* bind 7"):
        on_two_nodes(wire_port_range=(29500, 29505))


def test_a_busy_cluster_is_refused_with_how_long_serve_would_wait() -> None:
    """Unlike one that is too small."""
    node = dataclasses.replace(HERE, available=Resources(cpus=1, memory_bytes=GIB))
    config = make_config(engine=dp(1, tp=2), data_parallel_backend="ray")

    with pytest.raises(ConfigError, match="would wait 300 s for it") as busy:
        lay_out(config, [node], SCRIPTED)
    assert not isinstance(busy.value, PlacementError)
    with pytest.raises(PlacementError):
        lay_out(config, [dataclasses.replace(node, total=node.available)], SCRIPTED)


def test_the_machine_of_a_ray_node_is_larger_than_rays_count_of_it() -> None:
    """So what does not fit there is a warning, and the start will tell."""
    config = make_config(engine=dp(8), data_parallel_backend="ray")

    layout = lay_out(config, [make_node("a", gib=4)], MODEL)

    assert any("by Ray's count of its memory" in line for line in layout.warnings)


def test_a_scripted_model_needs_no_gpu() -> None:
    """It has nothing to compute: as many ranks as one likes, on any machine."""
    layout = lay_out(make_config(engine=dp(4)), [make_node("a", gpus=1)], SCRIPTED)

    assert {rank.devices for rank in layout.ranks} == {()}
    assert layout.ranks[0].need is not None
    assert layout.ranks[0].need.kv_tokens == 262144 - 16


def test_the_kv_cache_of_a_gpu_is_known_once_the_weights_are_there() -> None:
    """Unless its size is asked for: then in the blocks of the GPU's attention."""
    node = make_node("a", gpus=1)

    [rank] = lay_out(make_config(), [node], MODEL).ranks
    assert rank.need is not None
    assert (rank.need.kv_cache_bytes, rank.need.kv_tokens) == (None, None)
    assert "90% of free" in render(lay_out(make_config(), [node], MODEL))
    [rank] = lay_out(make_config(engine={"kv_cache_memory_bytes": GIB}), [node], MODEL).ranks
    assert rank.need is not None
    assert rank.need.kv_tokens == (GIB // (65536 * 256) - 1) * 256


def test_the_text_counts_what_is_alike_and_json_lists_it() -> None:
    """People see a line for each kind of wire, machines each wire."""
    layout = on_two_nodes()

    text = render(layout)
    assert "RAYWIRE::Worker_DP0_PP0_TP0 … DP1_PP0_TP1" in text
    assert "GPU 0-1" in text
    assert max(map(len, text.splitlines())) < 240
    listed = json.loads(json.dumps(layout.to_json()))
    assert len(listed["wires"]) == len(layout.wires) == 2 + 2 * 2 + 3 + 2 * (2 * 2 + 1)
    assert listed["ranks"][1]["devices"] == [0, 1]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (64, "64 B"), (1536, "1.5 KiB"), (3 * GIB, "3 GiB")]
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    """Powers of 1024, four digits."""
    assert size(num_bytes) == text


def test_a_config_json_without_sizes_is_one_clear_line(tmp_path: Path) -> None:
    """What is no size cannot be planned with."""
    folder = make_scripted_model(tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": "large"}')
    (folder / "model.safetensors").touch()

    with pytest.raises(ConfigError, match="something else than sizes"):
        read_facts(folder, make_config())


@pytest.mark.slow
def test_a_dry_run_looks_at_the_ray_cluster() -> None:
    """Or at the one that a start would make: its nodes, their ids, and what they reserve."""
    command = [sys.executable, "-m", "cluster", "plan", "scripted", "-dp", "2", "--json"]
    result = subprocess.run(
        [*command, "--data-parallel-backend", "ray"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    layout = json.loads(result.stdout)
    [node] = layout["nodes"]
    assert len(node["node_id"]) > 30
    assert node["reserved_cpus"] == 2
    assert {rank["node_id"] for rank in layout["ranks"]} == {node["node_id"]}
