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
    groups = (inner, inner.parent, tmp_path)
    monkeypatch.setattr(resources, "cgroups", lambda controller: iter(groups))
    return inner


def run_python(code: str, env: dict[str, str], *prefix: str) -> list[str]:
    """The words that it prints."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


def test_cores_are_limited_by_the_quota(cgroup: Path) -> None:
    """Half a core is one; what a group above allows counts as well; no limit is the machine's."""
    everything = len(os.sched_getaffinity(0))
    assert resources.available_cores() == everything
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert resources.available_cores() == everything
    (cgroup.parent / "cpu.max").write_text("50000 100000\n")
    assert resources.available_cores() == 1


def test_older_control_groups_limit_cores_too(cgroup: Path) -> None:
    """Version 1 has the quota in two files, and -1 for none. A cent of a core is one."""
    everything = len(os.sched_getaffinity(0))
    (cgroup / "cpu.cfs_period_us").write_text("100000\n")
    (cgroup / "cpu.cfs_quota_us").write_text("-1\n")
    assert resources.available_cores() == everything
    (cgroup / "cpu.cfs_quota_us").write_text("1000\n")
    assert resources.available_cores() == 1


def test_groups_of_both_versions_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line for all controllers in version 2, one for a few of them in version 1; of each the
    group and those above it, up to where the file system begins."""
    lines = "9:name=systemd:/x\n4:memory:/a/b\n3:cpu,cpuacct:/pod/c\n0::/pod/c\n"
    monkeypatch.setattr(resources, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(resources, "read", lambda file: lines)
    paths = [str(folder.relative_to(tmp_path)) for folder in resources.cgroups("cpu")]
    assert paths == ["cpu/pod/c", "cpu/pod", "cpu", "pod/c", "pod", "."]
    paths = [str(folder.relative_to(tmp_path)) for folder in resources.cgroups("memory")]
    assert paths == ["memory/a/b", "memory/a", "memory", "pod/c", "pod", "."]


def test_cores_of_this_process_are_those_it_is_bound_to() -> None:
    """`taskset` gives one, so a worker takes one thread, whatever the machine has."""
    code = "from workers import resources; print(resources.available_cores())"
    core = str(min(os.sched_getaffinity(0)))
    bind = (
        f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.argv[1], sys.argv[1:])"
    )
    assert run_python(code, dict(os.environ), sys.executable, "-c", bind) == ["1"]


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


def test_older_control_groups_limit_memory_too(cgroup: Path) -> None:
    """Version 1 has cached files by group and of all below it; no limit is a huge number."""
    (cgroup / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert resources.total_memory() > 1 << 28
    (cgroup / "memory.limit_in_bytes").write_text("1000000\n")
    (cgroup / "memory.usage_in_bytes").write_text("700000\n")
    (cgroup / "memory.stat").write_text("inactive_file 100000\ntotal_inactive_file 400000\n")
    assert resources.total_memory() == 1_000_000
    assert resources.available_memory() == 700_000


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All workers of the machine, and at least one each; a number that was asked for is kept."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = worker_config(tmp_path, tp=2, num_local_engines=2)
    assert resources.num_threads(config) == 1  # as worker_config asks
    config = replace(config, executor=replace(config.executor, num_threads=None))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cores, threads in ((16, 4), (4, 1), (2, 1)):
        monkeypatch.setattr(resources, "available_cores", lambda n=cores: n)
        assert resources.num_threads(config) == threads


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), ("2,1", 2), ("many", 8), ("0", 8)])
def test_number_of_threads_that_the_user_sets_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, threads: int
) -> None:
    """OMP_NUM_THREADS, which may be a list, counts for torch and for our kernels; nonsense does
    not."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = worker_config(tmp_path)
    config = replace(config, executor=replace(config.executor, num_threads=None))
    monkeypatch.setattr(resources, "available_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
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
    assert run_python(code, env) == ["3", "eth7", "False"]


def test_resident_memory_is_ours() -> None:
    """Within the bounds of a Python process."""
    assert 1 << 20 < resources.resident_memory() < 1 << 40
