"""Which blocks a request holds, shares and needs. Used by the scheduler; the pool counts.

Blocks of a request, in the order of its tokens:

    [ found in the prefix cache ][ computed, registered ][ computed, not full ][ for this step ]
      shared, full                 shared from now on

A block is registered (made findable) when the step that computes its last token is *scheduled*, not
when it returns. Each worker executes the plans in the order they were made, and within a step
writes the keys and values of all scheduled tokens before any of them attends; so whoever finds the
block reads it after it was written, in the same step or a later one. For the same reason blocks may
be freed and handed on while a step that writes to them is under way: the next owner's writes come
later. If a step fails, the engine core is dead and its cache with it.

A step that is planned ahead may fill a block with a token that is not known yet, so has no hash:
the block is registered when the token has come. Unless that ended the request: the workers may
leave such a step out, and nobody has written there.
"""

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.request import Request

_NO_BLOCKS: list[int] = []
"""Shared by all who need none; never changed."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a request was not admitted, and what would change that."""

    request: Request
    enough: int
    """Blocks freed so far minus blocks reserved, from which on it might fit."""
    next_hash: bytes | None
    """Of the first block of its prefix that was not in the cache."""


class KVCacheManager:
    """Block tables of all requests over one pool of `num_blocks` blocks (the null block included).

    Where prefix caching is off, requests come without hashes and so nothing is found or shared.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._refusal: _Refusal | None = None
        """The last answer of `admit`, if that was no."""

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return self._pool.usage

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks that have made room for others so far."""
        return self._pool.num_evicted

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that `request` lacks to hold all its known tokens."""
        return -(-request.num_tokens // self._block_size) - len(request.block_ids)

    def find_cached(self, request: Request) -> list[int]:
        """The longest cached prefix of `request`, in blocks.

        One token at least is left to compute: the next one is sampled from its output.
        """
        if not request.can_share_blocks:
            return _NO_BLOCKS
        return self._pool.find(request.block_hashes, self._num_shareable(request))

    def admit(self, request: Request, cached: list[int], num_tokens: int, reserved: int) -> bool:
        """Give `request` the `cached` blocks and new ones, for its first `num_tokens` tokens.

        False, and nothing changes, unless all its known tokens would fit beside the `reserved`
        blocks that running requests are going to need: who starts to prefill can also end it.
        """
        if (lacking := self._num_lacking(request, cached, reserved)) > 0:
            self._refusal = self._refuse(request, cached, lacking, reserved)
            return False
        self._refusal = None
        self._pool.share(cached)
        num_new = -(-num_tokens // self._block_size) - len(cached)
        request.block_ids = cached + self._pool.allocate(num_new)
        request.num_registered_blocks = len(cached)
        return True

    def still_refuses(self, request: Request, reserved: int) -> bool:
        """Whether `admit` would refuse `request` again, as far as can be told without looking up
        its blocks: for a long prompt that takes a millisecond, and a request may wait for long.

        A block that is needed is a free one, or a cached one that somebody holds. There are more of
        both together only when a block is freed, when fewer are reserved, or when the cache has got
        the block that continues the prefix. (Any other block of the prefix that comes into the
        cache replaces one that was handed out.)
        """
        refusal = self._refusal
        if refusal is None or refusal.request is not request:
            return False
        if self._pool.num_freed - reserved >= refusal.enough:
            return False
        return refusal.next_hash is None or not self._pool.has(refusal.next_hash)

    def _num_lacking(self, request: Request, cached: list[int], reserved: int) -> int:
        """How many blocks too few there are for `request`."""
        room = self._pool.num_free - self._pool.count_free(cached) - reserved
        return self.num_missing_blocks(request) - len(cached) - room

    def _refuse(
        self, request: Request, cached: list[int], lacking: int, reserved: int
    ) -> "_Refusal":
        next_hash = None
        if request.can_share_blocks and len(cached) < self._num_shareable(request):
            next_hash = request.block_hashes[len(cached)]
        return _Refusal(request, self._pool.num_freed - reserved + lacking, next_hash)

    def _num_shareable(self, request: Request) -> int:
        return (request.num_tokens - 1) // self._block_size

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """New blocks, so that `request` holds `num_tokens` tokens; None if the pool lacks them."""
        num_new = -(-num_tokens // self._block_size) - len(request.block_ids)
        if num_new <= 0:
            return _NO_BLOCKS
        if num_new > self._pool.num_free:
            return None
        new = self._pool.allocate(num_new)
        request.block_ids += new
        return new

    def register(self, request: Request) -> None:
        """Make the blocks findable that are full with the known tokens scheduled so far."""
        num_full = request.num_computed_tokens // self._block_size
        if num_full <= request.num_registered_blocks:
            return
        num_full = min(num_full, len(request.block_hashes))  # 0 without the prefix cache
        for index in range(request.num_registered_blocks, num_full):
            self._pool.register(request.block_ids[index], request.block_hashes[index])
        request.num_registered_blocks = num_full

    def free(self, request: Request) -> None:
        """Take all blocks from `request`; full ones stay findable until they are handed out."""
        self._pool.free(request.block_ids)
        request.block_ids = []

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. Refused (False) while a request holds blocks."""
        return self._pool.reset()

    def validate(self, requests: list[Request]) -> None:
        """Check the pool against the block tables of all requests. For tests."""
        self._pool.validate([request.block_ids for request in requests])
