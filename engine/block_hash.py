"""Names of full KV blocks: two blocks have the same hash only if their KV content is the same.

    root      = sha256(label, LoRA adapter, cache salt)
    hash of 0 = sha256(root      | tokens of block 0 [| images in block 0])
    hash of 1 = sha256(hash of 0 | tokens of block 1 [| images in block 1])

So a hash stands for everything that the block's keys and values depend on, from the first token
on: chaining carries the adapter and the salt to every block. SHA-256, because whoever can make two
prompts collide reads another tenant's cache; there is no cheaper hash to choose. Computed on the
input thread by `EngineCore.prepare`, and by the scheduler as outputs fill blocks.

The hash is the only check of a hit. Comparing the token ids of each block as well would cost little
(0.1 ms for 100,000 tokens, 100 bytes a block) and prove little: what comes before a block, and its
adapter, salt and images, would still be told apart by the hash alone. So a second guard would have
to keep and compare all of that, against collisions of which SHA-256 has none known.
"""

from collections.abc import Sequence
from hashlib import sha256

import msgspec

from engine.wire import LoRARequest, MultiModalFeature

TOKEN_BYTES = 4


def root_hash(lora_request: LoRARequest | None = None, cache_salt: str | None = None) -> bytes:
    """The parent of a request's first block: what all its blocks depend on beside the tokens."""
    adapter = None if lora_request is None else (lora_request.name, lora_request.path)
    # msgpack is self-delimiting, so no two (adapter, salt) pairs give the same bytes.
    return sha256(msgspec.msgpack.encode(("raywire kv block", adapter, cache_salt))).digest()


def hash_full_blocks(
    parent: bytes,
    token_bytes: bytes | memoryview,
    block_size: int,
    first_token: int = 0,
    features: Sequence[MultiModalFeature] = (),
) -> list[bytes]:
    """Hashes of the full blocks in `token_bytes`, in order; a partial last block has none.

    Args:
        parent: hash of the block before, or `root_hash`.
        token_bytes: token ids as raw little-endian u32, from the start of a block on.
        first_token: position of the first of them in its request.
        features: images and sounds of the whole request.
    """
    block_bytes = block_size * TOKEN_BYTES
    hashes = []
    for start in range(0, len(token_bytes) - block_bytes + 1, block_bytes):
        content = parent + token_bytes[start : start + block_bytes]
        if features:
            content += _extras(features, first_token + start // TOKEN_BYTES, block_size)
        parent = sha256(content).digest()
        hashes.append(parent)
    return hashes


def _extras(features: Sequence[MultiModalFeature], start: int, block_size: int) -> bytes:
    """The images that reach into the block at `start`: which one, and where in the block it begins.

    Parent and tokens have a fixed length, so what follows them cannot be mistaken for them.
    """
    inside = [
        (feature.modality, feature.hash, feature.offset - start)
        for feature in features
        if feature.offset < start + block_size and start < feature.offset + feature.length
    ]
    return msgspec.msgpack.encode(inside) if inside else b""
