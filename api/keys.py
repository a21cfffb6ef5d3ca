"""Keys: which ones there are, and whether a request has one. Used by `guard`; the command makes
`Keys` of flags, files and variables.

Only SHA-256 hashes are kept, so that neither a dump of the settings nor one of the memory shows a
key. All have one length, are compared in constant time, and all of them each time: how long an
answer takes tells nothing of how much of a key was right.
"""

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_KEY_CHARS = 512
MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1000
"""Of one kind: each request is compared with all of them, in a fifth of a millisecond."""
_LOOK_EVERY_S = 1.0
"""How often a file of keys may be asked whether it has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of one kind. False where there are none: then nothing of that kind is asked for."""

    hashes: tuple[bytes, ...] = field(default=(), repr=False)
    """Of those that are given at the start."""

    file: Path | None = None
    """Has more, one a line. Read again when it changes."""

    def __bool__(self) -> bool:
        return bool(self.hashes) or self.file is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Which keys there are, and what they open."""

    api: Keys = Keys()
    """For every route but the probes, /metrics and those of the administrator. None: open."""

    metrics: Keys = Keys()
    """For /metrics, where those of the API do as well."""

    has_open_metrics: bool = False
    """/metrics is open though there are keys."""

    admin: Keys = Keys()
    """For the administrator's routes, which do not exist without one."""

    salts_prefix_cache: bool = False
    """Requests share cached prefixes only with those of the same key."""


class KeyRing:
    """The keys of one kind, as they are now.

    Args:
        keys: of that kind.

    Raises:
        ConfigError: the file has none, or cannot be read.
    """

    def __init__(self, keys: Keys) -> None:
        self._known = self._given = keys.hashes
        self._file = keys.file
        self._stamp: tuple[int, ...] | None = None
        self._look_at = 0.0
        if keys.file is not None:
            self._stamp = _stamp(keys.file)
            self._known += hashes_of(read_file(keys.file), str(keys.file))

    def find(self, offered: bytes) -> bytes | None:
        """The hash of a key, if it is one of these."""
        if self._file is not None and time.monotonic() >= self._look_at:
            self._look(self._file)
        hashed = hash_of(offered)
        found = None
        for known in self._known:  # all of them, whatever is found
            if hmac.compare_digest(known, hashed):
                found = known
        return found

    def _look(self, file: Path) -> None:
        """Take up what has changed. What cannot be read changes nothing."""
        self._look_at = time.monotonic() + _LOOK_EVERY_S
        before, self._stamp = self._stamp, None
        try:
            self._stamp = _stamp(file)
            if self._stamp == before:
                return
            in_file = hashes_of(read_file(file, may_be_empty=True), str(file))
        except ConfigError as error:
            if (before, self._stamp) != (None, None):  # once, not every second
                logger.error("the keys stay as they were: %s", error)
        else:
            self._known = self._given + in_file
            logger.info("keys read again file=%s num_keys=%d", file, len(in_file))


def hash_of(key: bytes) -> bytes:
    """What is kept of a key, and compared."""
    return hashlib.sha256(key).digest()


def hashes_of(keys: Iterable[str], where: str) -> tuple[bytes, ...]:
    """The hashes of keys.

    Raises:
        ConfigError: one cannot be the value of a header. It is not shown.
    """
    hashes = []
    for number, key in enumerate(keys, start=1):
        if not (0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()) or (
            " " in key
        ):
            raise ConfigError(
                f"{where}: key {number} is none; a key has 1 to {MAX_KEY_CHARS} letters, digits and"
                " signs of ASCII, without blanks"
            )
        hashes.append(hash_of(key.encode()))
    if len(hashes) > MAX_KEYS:
        raise ConfigError(f"{where}: {len(hashes)} keys are more than {MAX_KEYS}")
    return tuple(dict.fromkeys(hashes))


def read_file(file: Path, *, may_be_empty: bool = False) -> list[str]:
    """The keys in a file: one a line; blank lines and those that begin with # aside.

    Raises:
        ConfigError: it cannot be read, is no such file, or has no key.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no file of keys, one a line") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} is longer than {MAX_FILE_BYTES} bytes: no file of keys")
    lines = (line.strip() for line in text.splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys and not may_be_empty:
        raise ConfigError(f"{file} has no key: write one a line")
    return keys


def _stamp(file: Path) -> tuple[int, ...]:
    """Changes with the file, also where a link to it points elsewhere, as a secret's does."""
    try:
        found = os.stat(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns
