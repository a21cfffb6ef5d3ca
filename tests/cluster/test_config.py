"""What a user may ask for, and what comes of it."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from cluster.config import EngineOptions, ResolvedModel, ServeConfig
from cluster.environment import Environment
from engine.config import WireConfig
from engine.errors import ConfigError

MODEL = ResolvedModel(name="m", path=Path("/models/m"), model_type="llama")
FOUR_RANKS = EngineOptions(model="m", data_parallel_size=4)


def test_options_reach_the_engine() -> None:
    """Each option ends in the slice that its owner reads."""
    options = EngineOptions(
        model="m", tensor_parallel_size=2, max_num_seqs=4, block_size=32, max_model_len="auto"
    )
    wire = WireConfig(request_addresses=("ipc://a",), output_addresses=("ipc://b",))

    [config] = options.engine_configs(MODEL, wire, Environment(mq_max_chunk_bytes=1 << 20), "INFO")

    assert config.model.path == "/models/m"
    assert config.model.max_model_len == "auto"
    assert config.parallel.world_size == 2
    assert config.scheduler.max_num_seqs == 4
    assert config.cache.block_size == 32
    assert config.executor.ring_chunk_bytes == 1 << 20
    assert config.wire == wire


def test_each_rank_gets_its_number() -> None:
    """Ranks share everything but their rank, and know how many they are."""
    options = EngineOptions(model="m", data_parallel_size=3)
    wire = WireConfig(request_addresses=(), output_addresses=())

    configs = options.engine_configs(MODEL, wire, Environment(), "INFO")

    assert [c.parallel.data_parallel_rank for c in configs] == [0, 1, 2]
    assert {c.executor.num_local_engines for c in configs} == {3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "no model given"),
        ({"max_model_len": 0}, "--max-model-len must be at least 1"),
        ({"block_size": 24}, "--block-size must be a power of two"),
        ({"max_num_seqs": 0}, "max_num_seqs must be from 1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens .* is below"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"long_prefill_token_threshold": -1}, "--long-prefill-token-threshold"),
        ({"startup_timeout": 0.0}, "--startup-timeout must be positive"),
        ({"startup_timeout": math.nan}, "--startup-timeout must be positive"),
    ],
)
def test_mistakes_show_before_anything_starts(options: dict[str, Any], message: str) -> None:
    """A ConfigError that names the option, at construction."""
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**{"model": "m", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "--port must be from 0 to 65535"),
        ({"shutdown_timeout": -1.0}, "--shutdown-timeout must not be negative"),
        ({"placement_timeout": 0.0}, "--placement-timeout must be positive"),
        ({"placement_timeout": math.nan}, "--placement-timeout must be positive"),
        ({"wire_port_range": (0, 5)}, "--wire-port-range must be two ports"),
        ({"wire_port_range": (6, 5)}, "the lower one first, not 6-5"),
        ({"wire_port_range": (6, 65536)}, "--wire-port-range must be two ports"),
        ({"data_parallel_placement": "strict"}, "needs --data-parallel-size-local"),
        ({"data_parallel_size_local": 2}, "must divide --data-parallel-size 1"),
        (
            {"data_parallel_size_local": 1, "data_parallel_placement": "spread"},
            "goes with --data-parallel-placement strict",
        ),
        (
            {"ray_address": "10.0.0.1:6379", "data_parallel_backend": "mp"},
            "--ray-address goes with --data-parallel-backend ray",
        ),
        ({"shutdown_timeout": math.nan}, "--shutdown-timeout must not be negative"),
        ({"engine": FOUR_RANKS, "data_parallel_rank": 4}, "must be from 0 to 3"),
        (
            {"engine": FOUR_RANKS, "data_parallel_rank": 1, "data_parallel_size_local": 2},
            "one rank",
        ),
        ({"engine": FOUR_RANKS, "data_parallel_size_local": 2}, "add --data-parallel-hybrid-lb"),
        ({"engine": FOUR_RANKS, "data_parallel_hybrid_lb": True}, "needs --data-parallel-size-loc"),
        (
            {
                "engine": FOUR_RANKS,
                "data_parallel_backend": "ray",
                "data_parallel_start_rank": 2,
                "data_parallel_size_local": 2,
            },
            "the placement numbers the ranks",
        ),
        (
            {
                "engine": FOUR_RANKS,
                "data_parallel_backend": "ray",
                "data_parallel_hybrid_lb": True,
                "data_parallel_size_local": 2,
                "port": 0,
            },
            "a port that nobody knows",
        ),
        (
            {
                "engine": FOUR_RANKS,
                "data_parallel_start_rank": 3,
                "data_parallel_size_local": 2,
            },
            "ranks 3 to 4 .* are not within",
        ),
    ],
)
def test_a_server_checks_its_own(options: dict[str, Any], message: str) -> None:
    """What only serving has."""
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**{"engine": EngineOptions(model="m"), **options})


def test_the_flag_goes_before_the_variable() -> None:
    """--log-level, then RAYWIRE_LOG_LEVEL, then INFO."""
    engine = EngineOptions(model="m")
    environment = Environment(log_level="ERROR")

    assert ServeConfig(engine=engine).log_level == "INFO"
    assert ServeConfig(engine=engine, environment=environment).log_level == "ERROR"
    chosen = dataclasses.replace(engine, log_level="DEBUG")
    assert ServeConfig(engine=chosen, environment=environment).log_level == "DEBUG"


def test_a_server_speaks_to_all_ranks_or_to_its_own() -> None:
    """Internal, external and hybrid balancing; the formula counts what one server runs."""
    internal = ServeConfig(engine=FOUR_RANKS)
    external = ServeConfig(engine=FOUR_RANKS, data_parallel_rank=2)
    hybrid = ServeConfig(engine=FOUR_RANKS, data_parallel_start_rank=2, data_parallel_size_local=2)
    assert [c.ranks for c in (internal, external, hybrid)] == [range(4), range(2, 3), range(2, 4)]
    assert internal.topology.num_processes == 4 + 4 + 4 + 1
    assert external.topology.titles() == [
        "RAYWIRE::APIServer_0",
        "RAYWIRE::EngineCore_DP2",
        "RAYWIRE::Worker_DP2_PP0_TP0",
    ]
    assert hybrid.topology.num_processes == 2 + 2 + 2 + 1


def test_ranks_of_a_hybrid_server_count_from_zero_on_its_wire() -> None:
    """And each has the devices of this node that follow the last one's."""
    options = EngineOptions(model="m", data_parallel_size=4, tensor_parallel_size=2)
    wire = WireConfig(request_addresses=(), output_addresses=())

    configs = options.engine_configs(MODEL, wire, Environment(), "INFO", range(2, 4))

    assert [c.parallel.data_parallel_rank for c in configs] == [2, 3]
    assert [c.parallel.engine_index for c in configs] == [0, 1]
    assert [c.executor.first_device for c in configs] == [0, 2]
    assert {c.executor.num_local_engines for c in configs} == {2}


def test_ray_is_used_where_one_asks_for_it_or_runs_in_it() -> None:
    """The flag, an address, or being a job of a cluster; child processes otherwise."""
    engine, in_job = EngineOptions(model="m"), Environment(is_ray_job=True)

    assert ServeConfig(engine=engine).backend == "mp"
    assert ServeConfig(engine=engine, data_parallel_backend="ray").backend == "ray"
    assert ServeConfig(engine=engine, ray_address="10.0.0.1:6379").backend == "ray"
    assert ServeConfig(engine=engine, environment=in_job).backend == "ray"
    asked = ServeConfig(engine=engine, environment=in_job, data_parallel_backend="mp")
    assert asked.backend == "mp"


def test_a_number_of_ranks_per_node_makes_the_placement_strict() -> None:
    """As vLLM's flag of that name does; ranks are packed otherwise."""
    engine = EngineOptions(model="m")

    assert ServeConfig(engine=engine).strategy == "pack"
    assert ServeConfig(engine=engine, data_parallel_size_local=1).strategy == "strict"
    assert ServeConfig(engine=engine, data_parallel_placement="spread").strategy == "spread"


@pytest.mark.parametrize(
    "settings",
    [{"device": "cuda"}, {"dtype": "float32"}, {"dtype": "float16"}, {"linear_backend": "torch"}],
)
def test_a_quantization_that_cannot_be_had_is_refused(settings: dict[str, Any]) -> None:
    """Before anything starts, with the flag that it does not go with."""
    ((name, value),) = settings.items()
    with pytest.raises(
        ConfigError, match=f"^--quantization int8 .*--{name.replace('_', '-')} {value}$"
    ):
        EngineOptions(model="m", quantization="int8", **settings)
    assert EngineOptions(model="m", quantization="int8").quantization == "int8"


def test_a_log_level_may_be_written_in_any_case() -> None:
    """`LLM` takes what the flag does; any other word is refused before an engine has started."""
    assert EngineOptions(model="m", log_level="info").log_level == "INFO"
    with pytest.raises(ConfigError, match=r"^--log-level must be one of DEBUG, .*, not 'loud'$"):
        EngineOptions(model="m", log_level="loud")


def test_the_scripted_model_has_no_weights_to_quantize() -> None:
    """Nor has a script of one's own."""
    for model in ("scripted", "scripted:mine.json"):
        with pytest.raises(ConfigError, match=r"^--quantization int8: the scripted model has no"):
            EngineOptions(model=model, quantization="int8")


def test_requests_that_may_wait_come_on_top_of_those_that_run() -> None:
    """Of all engines together; a limit that is given is the whole."""
    options = EngineOptions(model="m", data_parallel_size=3, max_num_seqs=100)
    assert ServeConfig(engine=options).queue_limit == 300 + 1024
    assert ServeConfig(engine=options, max_num_queued_reqs=7).queue_limit == 7
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        with pytest.raises(ConfigError, match="must be at least 1, not 0"):
            ServeConfig(engine=options, **{name: 0})  # type: ignore[arg-type]
