"""What a worker may use is what its container allows, not what the machine has."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.worker_settings import worker_config
from workers import resources


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group without limits, and one above it."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.setattr(resources, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(resources, "_cgroups", lambda: iter((inner, inner.parent, tmp_path)))
    return inner


def test_cores_are_limited_by_the_quota(cgroup: Path) -> None:
    """Half a core is one; what a group above allows counts as well; no limit is the machine's."""
    everything = len(os.sched_getaffinity(0))
    assert resources.available_cores() == everything
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert resources.available_cores() == everything
    (cgroup.parent / "cpu.max").write_text("50000 100000\n")
    assert resources.available_cores() == 1


def test_memory_is_limited_by_the_group(cgroup: Path) -> None:
    """The limit less what is used, of which cached files do not count."""
    assert resources.available_memory() > 1 << 28
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("700000\n")
    (cgroup / "memory.stat").write_text("anon 300000\ninactive_file 400000\n")
    assert resources.available_memory() == 700_000
    assert resources.total_memory() == 1_000_000
    (cgroup / "memory.max").write_text("max\n")
    assert resources.total_memory() > 1 << 28


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All workers of the machine, and at least one each; a number that was asked for is kept."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = worker_config(tmp_path, tp=2, num_local_engines=2)
    assert resources.num_threads(config) == 1  # as worker_config asks
    config = replace(config, executor=replace(config.executor, num_threads=None))
    for cores, threads in ((16, 4), (4, 1), (2, 1)):
        monkeypatch.setattr(resources, "available_cores", lambda n=cores: n)
        assert resources.num_threads(config) == threads


def test_environment_is_set_before_torch_and_without_it(tmp_path: Path) -> None:
    """What the user has set stays, and the module brings no torch."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code = f"""
import os, sys
from pathlib import Path
from engine.config import *
from workers import resources
config = EngineConfig(
    model=ModelConfig(path={str(tmp_path)!r}, model_type="llama"),
    wire=WireConfig(request_addresses=(), output_addresses=()),
    executor=ExecutorConfig(num_threads=3),
)
resources.prepare_environment(config)
print(os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"], "torch" in sys.modules)
"""
    env = os.environ | {"GLOO_SOCKET_IFNAME": "eth7"}
    env.pop("OMP_NUM_THREADS", None)
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert out.stdout.split() == ["3", "eth7", "False"]


def test_resident_memory_is_ours() -> None:
    """Within the bounds of a Python process."""
    assert 1 << 20 < resources.resident_memory() < 1 << 40
