"""What a worker does not import: parts of torch that transformers brings and nobody here uses."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.tiny_models import ARCHITECTURES, tiny_model

_UNUSED = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp")

_LOAD_ALL = f"""
import json, sys
from pathlib import Path
from tests.helpers.worker_settings import loaded_worker, worker_config

for folder in sys.argv[1:]:
    loaded_worker(worker_config(Path(folder), dtype="bfloat16"))
print(json.dumps([name for name in {_UNUSED} if name in sys.modules]))
"""

_USE_AFTERWARDS = """
from workers.lean_imports import lean_imports
with lean_imports():
    from transformers import AutoModelForCausalLM
    import transformers.models.llama.modeling_llama
import torch
assert torch.distributed.is_available()
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
"""

_ASK_FOR_MORE = """
import sys
from workers.lean_imports import lean_imports
with lean_imports():
    import torch
    assert "torch._dynamo.utils" not in sys.modules
    torch._dynamo.reset()
    import torch._dynamo.utils
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
print("real")
"""


def run_python(code: str, *arguments: str) -> str:
    """What it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_no_model_brings_the_compiler_or_distributed_tensors(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """From the first import to the warm-up, whatever the architecture."""
    folders = [tiny_model(name, tmp_path_factory.getbasetemp()) for name in ARCHITECTURES]
    assert json.loads(run_python(_LOAD_ALL, *map(str, folders))) == []


@pytest.mark.slow
def test_torch_is_whole_afterwards() -> None:
    """What was left out can still be had."""
    assert run_python(_USE_AFTERWARDS) == "2.0"


@pytest.mark.slow
def test_stand_in_gives_way_to_whoever_wants_more() -> None:
    """A name that it does not have is looked up in the real module, which takes its place."""
    assert run_python(_ASK_FOR_MORE) == "real"
