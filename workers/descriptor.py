"""A file descriptor that is handed down to child processes. Base of bells and nameless files."""

import os
from multiprocessing import context, reduction
from typing import Protocol


class _HandedDown(Protocol):
    """What multiprocessing makes of a descriptor on its way to a child."""

    def detach(self) -> int: ...


class Descriptor:
    """Owns an open descriptor. As a start-up argument of a child process it arrives there as one of
    the child's own, whatever the start method."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __reduce__(self) -> tuple[object, ...]:
        context.assert_spawning(self)  # there is no other way to send it that we want
        return (_receive, (type(self), reduction.DupFd(self.fd)))


def _receive(kind: type[Descriptor], handed_down: _HandedDown) -> Descriptor:
    return kind(handed_down.detach())
