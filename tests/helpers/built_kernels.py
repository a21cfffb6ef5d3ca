"""The compiled kernels, built at the first use on this machine and kept where a server keeps
them. With KERNELS_FOR, they are those of a processor that can do less (`x86-64-v3`)."""

import functools
import os

import pytest

from cluster import environment
from workers import native, native_build
from workers.linear import NativeLinear

KERNELS_FOR = "KERNELS_FOR"

ARITHMETICS = ("float", "bf16-dot", "bf16-matrix")


def cache_dir() -> str:
    return str(environment.read(os.environ).cache_dir)


@functools.cache
def backend(num_threads: int = 2) -> NativeLinear:
    """Return the back end; skips the test where there cannot be one."""
    if processor := os.environ.get(KERNELS_FOR):
        native_build._instructions = lambda: f"-march={processor}"
    kernels = native_build.load(environment.read(os.environ).cache_dir, num_threads)
    if kernels is None:
        pytest.skip("no C++ compiler, or no AVX2: there are no kernels here")
    return NativeLinear(kernels)


def use_arithmetic(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the kernels multiply in this way; skips the test where the processor has no such."""
    kernels = backend().kernels
    has = {"float": True, "bf16-dot": kernels._has_dot, "bf16-matrix": kernels._has_matrix}
    if not has[name]:
        pytest.skip(f"this processor has no {name}")
    (arithmetic,) = (key for key, called in native._NAMES.items() if called == name)
    monkeypatch.setattr(kernels, "_arithmetic", arithmetic)
