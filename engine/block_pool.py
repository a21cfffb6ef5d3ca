"""The KV blocks of an engine core: who holds them, which are free, which content they have.

    block 0          the null block: pads block tables, is never handed out
    held             ref_count > 0; shared by as many requests as it says
    free             ref_count = 0, in a doubly linked list; the next to be handed out comes first

    head -> [without content] … -> [least recently freed] … -> [most recently freed] -> tail

A free block keeps its content, and its place in the hash map, until it is handed out again: that is
the prefix cache, and taking from the head is its LRU eviction. A block whose content nobody can
ask for goes to the head, so it is reused before anything worth keeping.

Columns indexed by block id instead of objects: a pool of 100,000 blocks is seven lists, made in
milliseconds and out of the garbage collector's sight. Used by `kv_cache_manager` only.
"""

from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` blocks, the null block among them."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "the null block and one to use"
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_freed = 0
        """Blocks that have become free so far."""
        self.num_evicted = 0
        """Of them, those whose content was forgotten for other content."""
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        # The null block is the list's anchor: after it comes the head, before it the tail.
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_held(self) -> int:
        return self.num_blocks - 1 - self.num_free

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold."""
        return self.num_held / (self.num_blocks - 1)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free blocks; their former content is forgotten."""
        assert count <= self.num_free, "the manager checks first"
        block_ids = []
        for _ in range(count):
            block_id = self._next[NULL_BLOCK]
            self._unlink(block_id)
            self._forget(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks with content once more; free ones are free no longer."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Let go of a request's blocks, which are in the order of its tokens.

        The last goes first, so that a prefix outlives what continues it: without its beginning a
        chain of blocks cannot be found.
        """
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} is freed twice"
            if self._ref_counts[block_id] == 0:
                self.num_freed += 1
                is_head = self._hashes[block_id] is None
                self._link(block_id, self._next[NULL_BLOCK] if is_head else NULL_BLOCK)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a full block findable. Where its content exists already, the first one stays."""
        if self._block_of_hash.setdefault(block_hash, block_id) == block_id:
            self._hashes[block_id] = block_hash

    def find(self, block_hashes: Iterable[bytes], most: int) -> list[int]:
        """The blocks that hold the first of `block_hashes`, up to the first miss or `most`."""
        found: list[int] = []
        for block_hash in block_hashes:
            block_id = self._block_of_hash.get(block_hash)
            if block_id is None or len(found) == most:
                break
            found.append(block_id)
        return found

    def has(self, block_hash: bytes) -> bool:
        return block_hash in self._block_of_hash

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of them are free now: sharing those costs free blocks."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def reset(self) -> bool:
        """Forget all content. Refused (False) while any block is held."""
        if self.num_held:
            return False
        self._block_of_hash.clear()
        self._hashes = [None] * self.num_blocks
        return True

    def _unlink(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link(self, block_id: int, after: int) -> None:
        """Put a block into the free list, just before `after`; the anchor stands for the end."""
        before = self._previous[after]
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self.num_free += 1

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_of_hash[block_hash]
            self._hashes[block_id] = None
            self.num_evicted += 1

    def validate(self, tables: Iterable[Sequence[int]]) -> None:
        """Check every invariant against the block tables of all requests. For tests."""
        expected = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"
            for block_id in table:
                expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts are not the sum of the tables"
        free = self._walk()
        assert len(free) == len(set(free)) == self.num_free
        assert NULL_BLOCK not in free
        assert all(expected[block_id] == 0 for block_id in free), "a block is both free and held"
        assert self.num_free + sum(count > 0 for count in expected) == self.num_blocks - 1
        hashed = {h: block_id for block_id, h in enumerate(self._hashes) if h is not None}
        assert hashed == self._block_of_hash, "hash map and blocks disagree"

    def _walk(self) -> list[int]:
        """The free list, checked in both directions."""
        free = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            assert self._previous[self._next[block_id]] == block_id
            free.append(block_id)
            block_id = self._next[block_id]
        return free
