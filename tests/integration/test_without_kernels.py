"""A server where our kernels cannot be had, or are not wanted: it says so in a line, and works."""

import sys
from pathlib import Path

import pytest

from tests.helpers.server import running_server
from tests.helpers.tiny_models import tiny_model

pytestmark = pytest.mark.slow

NO_COMPILER = {"PATH": str(Path(sys.executable).parent)}
NO_CACHE = {"RAYWIRE_CACHE_DIR": "/proc/raywire"}  # not even root can make it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model("gemma3", tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize(
    ("env", "flags", "num_warnings"),
    [(NO_COMPILER, (), 1), (NO_CACHE, (), 1), ({}, ("--linear-backend", "torch"), 0)],
    ids=["no compiler", "no cache", "not wanted"],
)
def test_torch_computes_instead(
    tmp_path: Path, model: str, env: dict[str, str], flags: tuple[str, ...], num_warnings: int
) -> None:
    """One warning where that is nobody's wish."""
    env = {"RAYWIRE_CACHE_DIR": str(tmp_path), **env}
    with running_server(model, "--dtype", "bfloat16", *flags, env=env) as server:
        with server.http() as client:
            body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 3}
            assert client.post("/v1/completions", json=body).status_code == 200
        assert server.log.count("kernels not available") == num_warnings
        assert "linear=torch" in server.log


def test_kernels_that_are_asked_for_and_cannot_be_had_are_a_refusal(
    tmp_path: Path, model: str
) -> None:
    """The last line says why, and the exit code that it is a setting's."""
    env = {"RAYWIRE_CACHE_DIR": str(tmp_path), **NO_COMPILER}
    flags = ("--dtype", "bfloat16", "--linear-backend", "native")
    with running_server(model, *flags, env=env, is_ready_awaited=False) as server:
        assert server.process.wait(60) == 2
        assert server.log.splitlines()[-1].startswith("error: --linear-backend native: no kernels")
