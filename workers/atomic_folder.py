"""A folder that appears whole or not at all, however many processes write it. No torch.

Used for what is kept in the cache: `convert` writes models there, `cluster.scripted_source`
scripts.
"""

import contextlib
import fcntl
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path | None]:
    """Yield an empty folder whose content becomes `target` when the block ends without an error.

    One process writes while others wait; these, and all that come when `target` is there, get None.
    What a killed writer has left is removed by the next one, or by `discard_draft`.

    Raises:
        OSError: the place cannot be written.
    """
    if target.is_dir():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(_lock_file(target)):
        if target.is_dir():
            yield None
            return
        draft = _draft(target)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            yield draft
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def discard_draft(target: Path) -> None:
    """Remove what a writer of `target` that was killed has left, unless another one is at it."""
    if _draft(target).exists():
        with contextlib.suppress(OSError), _lock_file(target).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(_draft(target), ignore_errors=True)


def _draft(target: Path) -> Path:
    return target.with_name(f".{target.name}.draft")


def _lock_file(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel releases when this process ends in whatever way."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process to finish %s", path.name.strip("."))
            fcntl.flock(file, fcntl.LOCK_EX)
        # The file stays: were it removed, a third process could lock a new one beside a waiting
        # one.
        yield
