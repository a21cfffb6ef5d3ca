"""RAYWIRE_ variables: read once, checked, and not confused with other people's."""

from pathlib import Path

import pytest

from cluster import environment
from cluster.environment import Environment
from engine.errors import ConfigError


def test_nothing_set_gives_the_defaults() -> None:
    """An empty variable is an unset one."""
    unset = environment.read({})

    assert unset == environment.read({"RAYWIRE_RPC_BASE_PATH": "", "RAYWIRE_LOG_LEVEL": " "})
    assert unset.mq_max_chunk_bytes == 16 << 20
    assert unset.execute_model_timeout_s == 300
    assert unset.cache_dir == Path.home() / ".cache" / "raywire"


def test_values_are_converted() -> None:
    """Mebibytes become bytes, levels upper case, paths are expanded."""
    assert environment.read(
        {
            "RAYWIRE_CACHE_DIR": "~/models",
            "RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS": "2.5",
            "RAYWIRE_LOG_LEVEL": "debug",
            "RAYWIRE_MQ_MAX_CHUNK_BYTES_MB": "4",
            "RAYWIRE_RPC_BASE_PATH": "/run/raywire",
            "RAYWIRE_WORKER_MULTIPROC_METHOD": "fork",
        }
    ) == Environment(
        cache_dir=Path.home() / "models",
        execute_model_timeout_s=2.5,
        log_level="DEBUG",
        mq_max_chunk_bytes=4 << 20,
        rpc_base_path="/run/raywire",
        worker_multiproc_method="fork",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAYWIRE_CACHE_DIR", "~nobody-has-this-name/models"),
        ("RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "soon"),
        ("RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "nan"),
        ("RAYWIRE_LOG_LEVEL", "loud"),
        ("RAYWIRE_MQ_MAX_CHUNK_BYTES_MB", "0"),
        ("RAYWIRE_MQ_MAX_CHUNK_BYTES_MB", "16MB"),
        ("RAYWIRE_WORKER_MULTIPROC_METHOD", "forkserver"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: str) -> None:
    """One line with variable and value, before anything starts."""
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        environment.read({name: value})


def test_vllm_variables_are_named_with_ours() -> None:
    """Who comes from vLLM learns what to write instead; unrelated variables of it are let be."""
    assert environment.warnings({"VLLM_RPC_BASE_PATH": "/tmp", "VLLM_USE_TRITON": "1"}) == [
        "VLLM_RPC_BASE_PATH is vLLM's and has no effect here; use RAYWIRE_RPC_BASE_PATH"
    ]


def test_a_misspelt_variable_is_named() -> None:
    """Otherwise its author believes that it works."""
    [warning] = environment.warnings({"RAYWIRE_LOGLEVEL": "DEBUG"})

    assert warning.startswith("RAYWIRE_LOGLEVEL is no variable of raywire")


def test_kubernetes_service_links_are_let_be() -> None:
    """A Service called `raywire` puts these into every pod of its namespace."""
    links = {
        "RAYWIRE_SERVICE_HOST": "10.0.0.1",
        "RAYWIRE_SERVICE_PORT": "8000",
        "RAYWIRE_SERVICE_PORT_HTTP": "8000",
        "RAYWIRE_PORT": "tcp://10.0.0.1:8000",
        "RAYWIRE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "RAYWIRE_HEAD_SERVICE_HOST": "10.0.0.2",
    }

    assert environment.warnings(links) == []
    assert environment.read(links) == environment.read({})


def test_a_job_of_a_ray_cluster_knows_that_it_is_one() -> None:
    """By the variable that Ray gives to the entrypoint of a submitted job."""
    assert environment.read({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}).is_ray_job
    assert not environment.read({"RAY_ADDRESS": "10.0.0.1:6379"}).is_ray_job
