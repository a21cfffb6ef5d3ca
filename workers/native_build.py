"""Building our kernels: once per machine, kept in the cache. Used by whoever wants a `Kernels`.

The sources are `kernels/*.cpp`. They include no header of torch's, so that any C++ compiler builds
them in a few seconds, and a build does not depend on the version of torch. A build belongs to one
processor and one state of the sources; the name of its folder is a hash of both.
"""

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.errors import ConfigError
from workers import atomic_folder
from workers.native import Kernels

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("kernels")
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT_S = 300.0

_LIBRARY = "kernels.so"
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-pthread")


def load(cache_dir: Path, num_threads: int) -> Kernels | None:
    """The kernels; None, and one line in the log, where they cannot be had."""
    try:
        return require(cache_dir, num_threads)
    except ConfigError as error:
        logger.warning(
            "kernels not available (%s): torch computes instead, and a step takes several times as"
            " long",
            error,
        )
        return None


def require(cache_dir: Path, num_threads: int) -> Kernels:
    """Build the kernels if this machine has not yet, and load them.

    Raises:
        ConfigError: they cannot be had. It says why.
    """
    if not _has_fast_vectors():
        raise ConfigError("this processor has no AVX2")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    folder = cache_dir / "kernels" / _key()
    if compiler is None and not folder.is_dir():
        raise ConfigError(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    try:
        with atomic_folder.new_folder(folder) as draft:
            if draft is not None:
                assert compiler is not None
                _build(compiler, draft / _LIBRARY)
        return Kernels(ctypes.CDLL(str(folder / _LIBRARY)), num_threads)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(_first_line(error)) from error


def _build(compiler: str, target: Path) -> None:
    logger.info("building kernels for this processor, once; takes seconds")
    began = time.monotonic()
    sources = sorted(SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        objects = [Path(folder, source.name + ".o") for source in sources]
        list(pool.map(lambda one, to: _run(compiler, "-c", "-o", to, one), sources, objects))
        _run(compiler, "-shared", "-o", target, *objects)
    logger.info("kernels built compiler=%s seconds=%.1f", compiler, time.monotonic() - began)


def _run(compiler: str, *arguments: str | Path) -> None:
    command = [compiler, *_FLAGS, _instructions(), *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)


def _instructions() -> str:
    """The compiler's flag for whatever this processor can do."""
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _key() -> str:
    """Of the sources and the processor."""
    digest = hashlib.sha256(repr((_FLAGS, _instructions(), platform.machine())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update("\n".join(sorted(_processor())).encode())
    return digest.hexdigest()[:16]


def _processor() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {platform.processor()}
    names = ("model name", "flags", "Features", "CPU part")
    return {line for line in lines if line.startswith(names)}


def _has_fast_vectors() -> bool:
    """Whether the kernels' plain code becomes fast code here. An x86 processor without fused
    multiply-adds on eight floats is left to torch, which has nothing faster than that either."""
    if platform.machine() in ("aarch64", "arm64"):
        return True
    return any({"avx2", "fma"} <= set(line.split()) for line in _processor())


def _first_line(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    return next(iter(text.strip().splitlines()), type(error).__name__)
