"""`encrypted_content` of a reasoning item: the thought, packed. Pure.

Clients that keep conversations themselves ask for it (`include: reasoning.encrypted_content`) and
send back nothing else of a thought. OpenAI's is encrypted, because its thoughts are secret; ours
are in `content` for all to read, so this is no more than their text in another form.
"""

import base64
import binascii

_PREFIX = "raywire-thought:"


def pack(text: str) -> str:
    """The text as a client carries it."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def unpack(packed: str) -> str:
    """The text again; empty if it was packed, or encrypted, by somebody else."""
    if not packed.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(packed[len(_PREFIX) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
