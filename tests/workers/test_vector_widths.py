"""The kernels are plain code for vectors of any width: their tests hold with each of them."""

import os
import platform
import subprocess
import sys

import pytest

from tests.helpers.built_kernels import KERNELS_FOR, backend

TESTS = ("test_linear", "test_int8", "test_attention", "test_paged_attention")


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["x86-64-v2", "x86-64-v3"])
def test_kernels_for_narrower_vectors(processor: str) -> None:
    """Four floats, as on Arm, and eight; each is built and tested like this processor's own."""
    if platform.machine() != "x86_64":
        pytest.skip("the names of these processors are x86's")
    backend()  # skips where there is no compiler
    files = [f"tests/workers/{name}.py" for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *files],
        env=os.environ | {KERNELS_FOR: processor},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
