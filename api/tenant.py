"""Whose request this is, where requests of different keys must not share cached prefixes.

`guard` sets the salt of a request's key; `engine_client` puts it into every request that it sends
on, whatever route made it. How long a first token takes then tells nobody whether somebody else's
prompt began alike.
"""

import hmac
from contextvars import ContextVar

salt: ContextVar[str | None] = ContextVar("salt", default=None)
"""Of the key of the present request; None: all share."""


def salt_of(key_hash: bytes) -> str:
    """The salt that belongs to a key. It tells nothing of the key, and is the same in all API
    servers."""
    return hmac.digest(key_hash, b"raywire prefix cache salt", "sha256").hex()[:32]


def salted(cache_salt: str | None) -> str | None:
    """The salt of the present request: that of its key, with the client's own behind it."""
    own = salt.get()
    if own is None:
        return cache_salt
    return own if cache_salt is None else f"{own}:{cache_salt}"
