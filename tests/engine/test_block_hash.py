"""Blocks have equal hashes only if all that their KV depends on is equal."""

from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from engine import block_hash
from engine.block_hash import hash_full_blocks, root_hash
from engine.wire import LoRARequest, MultiModalFeature


def hashes(
    tokens: list[int],
    *,
    block_size: int = 4,
    root: bytes | None = None,
    features: tuple[MultiModalFeature, ...] = (),
) -> list[bytes]:
    data = np.asarray(tokens, dtype="<u4").tobytes()
    return hash_full_blocks(root or root_hash(), data, block_size, features=features)


def test_only_full_blocks_are_hashed() -> None:
    """A partial last block has no hash: its content will change."""
    assert [len(hashes([*range(n)])) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_stands_for_all_tokens_before_it() -> None:
    """Equal blocks after different beginnings differ; equal beginnings share."""
    one, other = hashes([1, 2, 3, 4, 9, 9, 9, 9]), hashes([1, 2, 3, 5, 9, 9, 9, 9])
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert hashes([1, 2, 3, 4])[0] == one[0]


@pytest.mark.row("S-47")
def test_adapter_and_salt_reach_every_block() -> None:
    """No block is shared across adapters or salts, and neither can pose as the other."""
    lora = LoRARequest("a", 1, "/a")
    roots = [
        root_hash(),
        root_hash(cache_salt="a"),
        root_hash(cache_salt="b"),
        root_hash(cache_salt=""),
        root_hash(lora),
        root_hash(LoRARequest("b", 1, "/a")),
        root_hash(LoRARequest("a", 1, "/b")),
        root_hash(lora, "a"),
    ]
    all_hashes = [h for root in roots for h in hashes([*range(8)], root=root)]
    assert len(set(all_hashes)) == 2 * len(roots)


@pytest.mark.row("S-47")
def test_an_image_changes_the_blocks_it_reaches_and_those_after() -> None:
    """Placeholders of different images have equal tokens, and different hashes."""

    def with_image(name: str, offset: int = 5) -> list[bytes]:
        image = MultiModalFeature("image", name, offset, 2)
        return hashes([*range(16)], features=(image,))

    plain, cat, dog = hashes([*range(16)]), with_image("cat"), with_image("dog")
    assert plain[0] == cat[0] == dog[0]  # before the image
    assert len({*plain[1:], *cat[1:], *dog[1:], *with_image("cat", 4)[1:]}) == 12
    assert with_image("cat") == cat


def test_a_block_costs_one_hash_of_its_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of all tokens before it again: a long prompt is hashed in linear time."""
    hashed: list[int] = []

    def counting_sha256(content: bytes) -> Any:
        hashed.append(len(content))
        return sha256(content)

    root = root_hash()
    monkeypatch.setattr(block_hash, "sha256", counting_sha256)
    assert len(hashes([*range(1000)], block_size=16, root=root)) == 62
    assert hashed == [32 + 16 * 4] * 62


@pytest.mark.row("S-47")
def test_no_image_can_be_told_as_tokens() -> None:
    """Images are written after tokens of known length, so no prompt can imitate them."""
    image = MultiModalFeature("image", "cat", 0, 4)
    assert hashes([1, 2, 3, 4], features=(image,)) != hashes([1, 2, 3, 4])


@pytest.mark.row("S-47")
def test_a_hash_is_sha256_and_nothing_random() -> None:
    """Whoever could make two prompts collide would read another tenant's cache."""
    root = sha256(b"\x93\xb0raywire kv block\xc0\xc0").digest()
    tokens = bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0])
    assert root_hash() == root
    assert hashes([1, 2, 3, 4]) == [sha256(root + tokens).digest()]
