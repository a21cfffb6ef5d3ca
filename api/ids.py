"""Names of requests and answers: unique. Those under which something can be read are secret too."""

import os
import random
import re
import secrets

from api.limits import MAX_ID_CHARS

# From the system's entropy once; asking for it each time would cost a system call.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)

_SAFE = re.compile(f"[A-Za-z0-9._:/=+@-]{{1,{MAX_ID_CHARS}}}")


def is_safe(name: str) -> bool:
    """Whether a name that a client gives can go into headers and logs."""
    return _SAFE.fullmatch(name) is not None


def new_id(prefix: str = "", num_bits: int = 96) -> str:
    """A name that no other request has."""
    return f"{prefix}{_random.getrandbits(num_bits):0{num_bits // 4}x}"


def answer_id(prefix: str, request_id: str | None) -> str:
    """The id of an answer, with the client's own name for it if it gave one."""
    return new_id(prefix) if request_id is None else f"{prefix}{request_id}"


def new_secret_id(prefix: str) -> str:
    """A name that nobody can guess: whoever knows it may read what has it."""
    return f"{prefix}{secrets.token_hex(20)}"
