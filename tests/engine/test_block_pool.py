"""Blocks are held, free, or both to be found again and to be handed out: never two at once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import NULL_BLOCK, BlockPool


def fill(pool: BlockPool, names: str) -> list[int]:
    """Allocate a block for each letter and give it that content."""
    block_ids = pool.allocate(len(names))
    for block_id, name in zip(block_ids, names, strict=True):
        pool.register(block_id, name.encode())
    return block_ids


def find(pool: BlockPool, names: str) -> list[int]:
    return pool.find([name.encode() for name in names], most=100)


def test_the_null_block_is_never_handed_out() -> None:
    """Block 0 pads block tables."""
    pool = BlockPool(5)
    assert NULL_BLOCK not in pool.allocate(4)
    assert pool.num_free == 0
    assert pool.usage == 1.0


def test_freed_content_is_found_until_its_block_is_needed() -> None:
    """The prefix cache is what lies in free blocks."""
    pool = BlockPool(4)
    a, b = fill(pool, "ab")
    pool.free([a, b])
    assert find(pool, "ab") == [a, b]
    new = pool.allocate(2)  # the block that was never used, then the end of the chain
    assert find(pool, "ab") == [a]
    assert b in new
    pool.validate([new])


def test_blocks_without_content_are_used_before_cached_ones() -> None:
    """What nobody can ask for is given up first, however fresh."""
    pool = BlockPool(4)
    pool.free(fill(pool, "a"))
    unnamed = pool.allocate(2)
    pool.free(unnamed)
    assert set(pool.allocate(2)) == set(unnamed)
    assert find(pool, "a")


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    """A request's blocks are freed in reverse, since without its beginning a chain is lost."""
    pool = BlockPool(5)
    chain = fill(pool, "abcd")
    pool.free(chain)
    for kept in (3, 2, 1, 0):
        pool.allocate(1)
        assert find(pool, "abcd") == chain[:kept]


def test_the_least_recently_freed_content_is_evicted_first() -> None:
    """Using a cached block again makes it young."""
    pool = BlockPool(3)
    (a,), (b,) = fill(pool, "a"), fill(pool, "b")
    pool.free([a])
    pool.free([b])
    pool.share([a])
    pool.free([a])
    assert pool.allocate(1) == [b]
    assert find(pool, "a") == [a]


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    """Reference counts say how many requests hold a block."""
    pool = BlockPool(3)
    (a,) = fill(pool, "a")
    pool.share([a])
    pool.free([a])
    assert pool.num_held == 1
    pool.validate([[a]])
    pool.free([a])
    assert pool.num_held == 0
    pool.validate([])


def test_of_equal_blocks_the_first_is_found() -> None:
    """Two requests that compute the same at once keep a block each; one becomes the cache's."""
    pool = BlockPool(4)
    (a,), (twin,) = fill(pool, "a"), fill(pool, "a")
    assert find(pool, "a") == [a]
    pool.free([twin])
    assert pool.allocate(1) == [twin]
    assert find(pool, "a") == [a]


def test_reset_is_refused_while_a_block_is_held() -> None:
    """Then nothing changes; afterwards nothing is found."""
    pool = BlockPool(4)
    chain = fill(pool, "ab")
    assert not pool.reset()
    assert find(pool, "ab") == chain
    pool.free(chain)
    assert pool.reset()
    assert find(pool, "ab") == []
    pool.validate([])


@settings(max_examples=100)
@given(st.integers(2, 12), st.data())
def test_any_sequence_of_uses_keeps_the_books(num_blocks: int, data: st.DataObject) -> None:
    """Free plus held is constant, and no block is both, whatever is done."""
    pool, tables = BlockPool(num_blocks), list[list[int]]()
    for _ in range(data.draw(st.integers(0, 20))):
        action = data.draw(st.sampled_from(["new", "cached", "free"]))
        if action == "free" and tables:
            pool.free(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        elif action == "cached":
            found = find(pool, "abcdef"[: data.draw(st.integers(1, 6))])
            pool.share(found)
            tables.append(found)
        elif pool.num_free:
            tables.append(fill(pool, "abcdef"[: data.draw(st.integers(1, min(6, pool.num_free)))]))
        pool.validate(tables)
