"""Nameless memory that a process shares with its children, reserved when it is made.

It has no name anywhere, only a descriptor that children inherit, so it is gone with the last
process that has it, however that one ends. Reserved means that every page is there from the start:
a write never meets a full memory, which would be a SIGBUS. Sealed means that nobody can shrink it
later, which would be one too. Reserving is quick (0.2 ms per MiB; the kernel clears a page when it
is first used).

What limits it: a `memfd` belongs to no mounted file system, so a container's small /dev/shm does
not matter; it counts as memory of the control group that made it. A group over its limit gets no
error but a SIGKILL, so `room_for_rings` looks before anything is reserved. Where Python or the
kernel has no `memfd_create`, an unnamed file in /dev/shm takes its place, and there the mount's
size counts as well.
"""

import contextlib
import fcntl
import mmap
import os
import tempfile

from engine.errors import ConfigError
from workers import resources
from workers.descriptor import Descriptor

_MIB = 1 << 20
_SHM = "/dev/shm"

MIN_CHUNK_BYTES = 1 * _MIB
"""Rings with smaller chunks would send every longer prompt through the side channel."""

RINGS_SHARE_OF_FREE = 4
"""The rings may take one part in so many of the free memory: weights and KV cache need the rest."""


class NamelessFile(Descriptor):
    """A file without a name, for this process and its children."""

    @classmethod
    def create(cls) -> "NamelessFile":
        if has_memfd():
            return cls(os.memfd_create("raywire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        with tempfile.TemporaryFile(dir=_SHM) as file:
            return cls(os.dup(file.fileno()))

    @property
    def path(self) -> str:
        """Opens the file in this process. Each process has its own path to it."""
        return f"/proc/self/fd/{self.fd}"


class SharedMemory:
    """Bytes that several processes see; zero at first."""

    def __init__(self, file: NamelessFile, num_bytes: int) -> None:
        self.file = file
        self._num_bytes = num_bytes
        self.bytes = mmap.mmap(file.fd, num_bytes)

    @classmethod
    def reserve(cls, num_bytes: int) -> "SharedMemory":
        """Make shared memory all of whose pages are there.

        Raises:
            ConfigError: there is not so much; the message has both numbers.
        """
        file = NamelessFile.create()
        try:
            os.posix_fallocate(file.fd, 0, num_bytes)
        except OSError as error:
            file.close()
            raise ConfigError(
                f"cannot reserve {num_bytes / _MIB:.1f} MiB of shared memory for a ring"
                f" ({error.strerror}): {_free_bytes() / _MIB:.1f} MiB are free; give the container"
                " more memory, or set RAYWIRE_MQ_MAX_CHUNK_BYTES_MB lower"
            ) from error
        if has_memfd():
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, seals)
        return cls(file, num_bytes)

    def close(self) -> None:
        self.bytes.close()
        self.file.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (SharedMemory, (self.file, self._num_bytes))


def has_memfd() -> bool:
    """Whether memory can be had without any file system. Builds of Python for old systems lack the
    call."""
    if not hasattr(os, "memfd_create"):
        return False
    with contextlib.suppress(OSError):
        os.close(os.memfd_create("raywire-probe"))
        return True
    return False


def room_for_rings(num_local_engines: int) -> int:
    """Bytes that the rings of one engine core may take on this machine."""
    return _free_bytes() // num_local_engines


def _free_bytes() -> int:
    memory = resources.available_memory() // RINGS_SHARE_OF_FREE
    if has_memfd():
        return memory
    mount = os.statvfs(_SHM)
    return min(memory, mount.f_bavail * mount.f_frsize)


def fit_chunk_bytes(wanted: int, num_chunks: int, room: int) -> int:
    """Return the size of a chunk, at most `wanted`, with which all rings together fit.

    Args:
        wanted: bytes of a chunk as configured.
        num_chunks: chunks of all rings of an engine core.
        room: bytes they may take together.

    Raises:
        ConfigError: not even the smallest chunks fit.
    """
    least = min(wanted, MIN_CHUNK_BYTES)
    fitting = room // num_chunks // mmap.PAGESIZE * mmap.PAGESIZE
    if fitting < least:
        raise ConfigError(
            f"the rings between engine core and workers need {num_chunks * least / _MIB:.0f} MiB of"
            f" shared memory ({num_chunks} chunks), and may take {room / _MIB:.0f} MiB: a quarter"
            f" of the free memory{'' if has_memfd() else f', and no more than {_SHM} has'};"
            " give the container more memory, or use fewer workers"
        )
    return min(wanted, fitting)
