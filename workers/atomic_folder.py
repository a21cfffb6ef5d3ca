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
    What a killed writer has left is removed by the next one.

    Raises:
        OSError: the place cannot be written.
    """
    if target.is_dir():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            yield None
            return
        draft = target.with_name(f".{target.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            yield draft
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


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
