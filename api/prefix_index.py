"""Which data-parallel rank probably holds which prefixes of prompts in its prefix cache. Pure.

    tokens   0      16     32   …    128    160    192    …    256          320   …
             |  a   |  b   |          |  i   |             |       m      |
    keys     a's = hash(salt, a)      i's = hash(key before, i)

A prefix is known by one hash, chained over the segments that it is made of, and the index remembers
which ranks were sent a prompt that begins with it. The first eight segments are a block long, later
ones at most a fourth of what is before them, and far from the start only some tokens are looked at.
So a prompt of 100,000 tokens costs 46 hashes of a few hundred bytes each; and two that differ only
between such tokens are taken for one.

All of it is a guess. Engine cores evict blocks without saying which, but their statistics say how
much they have written, and what a cache of known size was told before that is gone. A wrong guess
costs one prefill, which makes it true.

Used by `load_balancer`. `engine/block_hash.py` is where it matters that no two prompts are mixed
up; here a cheap hash with this process's own secret does.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from engine.codec import Array

MAX_PREFIXES = 1 << 17
"""Prefixes remembered, over all ranks: some 16 MB. The least recently used go first."""

_EVEN_SEGMENTS = 8
"""So many segments of one block, then half as many for every doubling of the length."""

_WHOLE_TOKENS = 2048
"""Up to here all tokens count,"""
_SAMPLE_STEP = 128
"""and beyond it one of so many."""

_FRESH_CLAIMS = 256
"""A claim is not made again before so many others: what many prompts share stays cheap."""

_TOKEN_BYTES = 4

_LONGEST = 1 << 24
"""Boundaries are laid out to here, in tokens."""

_NUM_PARTS = 4
"""A rank's claims grow old in so many steps."""


@dataclass(frozen=True, slots=True)
class Matches:
    """What the ranks hold of one prompt, by rank."""

    num_tokens: list[int]
    """Length of the longest prefix that the rank holds."""

    claimed_at: list[int]
    """When that was last claimed, on the index's own counter."""

    @classmethod
    def nothing(cls, num_ranks: int) -> Self:
        return cls([0] * num_ranks, [0] * num_ranks)

    def note(self, ranks: int, num_tokens: int, claimed_at: int) -> None:
        """The ranks of a bit mask hold so much, and no more."""
        while ranks and num_tokens:
            rank = (ranks & -ranks).bit_length() - 1
            ranks &= ranks - 1
            self.num_tokens[rank], self.claimed_at[rank] = num_tokens, claimed_at


@dataclass(slots=True)
class _RankAge:
    """How old claims of one rank may be. Times are the index's own counter of claims.

    `marks` are set whenever a quarter of the rank's cache has been written anew. What was claimed
    before the oldest of them has been overwritten since, unless it was used.
    """

    forgotten: int = 0
    """Claims made by then are void."""
    marks: deque[int] = field(default_factory=lambda: deque([0] * _NUM_PARTS, _NUM_PARTS))
    part_tokens: int = _LONGEST
    written_at_mark: int = 0

    def shift(self, mark: int) -> None:
        self.marks.append(mark)
        self.forgotten = self.marks[0]


class PrefixIndex:
    """Claims of ranks on prefixes.

    An entry is one integer, `time of the last claim << num_ranks | ranks that claim it`. A rank
    that loses its cache loses its claims by the time on them: nothing is searched.

    Args:
        num_ranks: data-parallel size.
        block_size: of the engine cores, in tokens: they keep whole blocks.
        max_prefixes: bound of what is remembered.
    """

    def __init__(self, num_ranks: int, block_size: int, max_prefixes: int = MAX_PREFIXES) -> None:
        self.block_size = block_size
        self._num_ranks = num_ranks
        self._max_prefixes = max_prefixes
        self._boundaries = _lay_out(block_size)
        ends = [_TOKEN_BYTES * _num_sampled(end) for end in self._boundaries]
        self._segments = [slice(start, end) for start, end in pairwise([0, *ends])]
        """In the bytes of the tokens that are looked at."""
        self._entries: OrderedDict[int, int] = OrderedDict()
        self._now = 0
        self._ages = [_RankAge() for _ in range(num_ranks)]
        self._valid_time, self._valid = -1, 0

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self, token_ids: Array, salt: Hashable = None) -> list[int]:
        """The keys of the prompt's tracked prefixes, the shortest first.

        Args:
            token_ids: `[num_tokens]` u32.
            salt: what else cached blocks depend on: cache salt, LoRA adapter.
        """
        tokens = token_ids[:_WHOLE_TOKENS].tobytes()
        # The last of each step, so that prompts which part somewhere differ before its end.
        tokens += token_ids[_WHOLE_TOKENS + _SAMPLE_STEP - 1 :: _SAMPLE_STEP].tobytes()
        key, keys = hash(salt), []
        for segment in self._segments[: bisect_right(self._boundaries, len(token_ids))]:
            key = hash((key, tokens[segment]))
            keys.append(key)
        return keys

    def find(self, keys: Sequence[int]) -> Matches:
        """What each rank holds of a prompt, as far as anybody knows."""
        matches = Matches.nothing(self._num_ranks)
        entries = self._entries
        depth = bisect_left(keys, True, key=lambda key: key not in entries)
        if depth == 0:
            return matches
        # Whoever holds a prefix holds all shorter ones: nobody holds more who is not in the first.
        missing = self._holders(entries[keys[0]])
        while missing and depth:
            depth -= 1
            entry = entries.get(keys[depth], 0)
            if holders := entry & missing:
                holders &= self._holders(entry)
                missing ^= holders
                matches.note(holders, self._boundaries[depth], entry >> self._num_ranks)
        return matches

    def claim(self, rank: int, keys: Sequence[int]) -> None:
        """`rank` is about to hold a prompt: it has been sent there."""
        self._now += 1
        entries, shift, bit = self._entries, self._num_ranks, 1 << rank
        fresh = self._now << shift | bit
        old = max(self._now - _FRESH_CLAIMS, self._ages[rank].marks[-1])
        for key in reversed(keys):  # the shortest, which most prompts share, goes last
            entry = entries.get(key)
            if entry is None:
                entries[key] = fresh
            elif entry & bit and entry >> shift > old:
                break  # and so are all shorter ones
            else:
                entries[key] = fresh | self._holders(entry)
                entries.move_to_end(key)
        while len(entries) > self._max_prefixes:
            entries.popitem(last=False)

    def restart(self, rank: int, cache_tokens: int) -> None:
        """The rank begins with an empty cache of so many tokens."""
        self._ages[rank] = _RankAge(part_tokens=max(1, cache_tokens // _NUM_PARTS))
        self.forget(rank)

    def forget(self, rank: int) -> None:
        """The rank has emptied its cache: all its claims are void."""
        age = self._ages[rank]
        age.forgotten = self._now
        age.marks.extend([self._now] * _NUM_PARTS)
        self._valid_time = -1

    def take_written(self, rank: int, num_tokens: int) -> None:
        """Let old claims go.

        Args:
            rank: whose.
            num_tokens: that it has written into its cache since its start.
        """
        age = self._ages[rank]
        num_parts = (num_tokens - age.written_at_mark) // age.part_tokens
        if num_parts <= 0:
            return
        age.written_at_mark += num_parts * age.part_tokens
        for _ in range(min(num_parts, _NUM_PARTS)):
            self._shift(age, self._now)

    def doubt(self, rank: int, claimed_at: int) -> None:
        """A prefix claimed then was no longer there: the rank forgets faster than it writes, as
        when running requests fill most of its cache. The oldest quarter of its claims is void; not
        all that are as old as this one, which another rank may have renewed.

        The prefix itself is there again: whoever missed it has just computed it. And one claimed
        since the last mark says nothing: it may not have been computed yet.
        """
        age = self._ages[rank]
        if age.forgotten < claimed_at <= age.marks[-1]:
            forgotten = age.forgotten
            while age.forgotten == forgotten:
                self._shift(age, age.marks[-1])

    def _shift(self, age: _RankAge, mark: int) -> None:
        age.shift(mark)
        self._valid_time = -1

    def _holders(self, entry: int) -> int:
        """The ranks whose claims on a prefix still count."""
        time = entry >> self._num_ranks
        if time != self._valid_time:  # the prefixes of a prompt were mostly claimed together
            self._valid_time = time
            self._valid = sum(1 << r for r, age in enumerate(self._ages) if age.forgotten < time)
        return entry & self._valid


def _num_sampled(num_tokens: int) -> int:
    """How many of the first tokens of a prompt are looked at."""
    return min(num_tokens, _WHOLE_TOKENS) + max(0, num_tokens - _WHOLE_TOKENS) // _SAMPLE_STEP


def _lay_out(block_size: int) -> list[int]:
    """Where tracked prefixes end, in tokens."""
    boundaries = []
    num_blocks, step = 0, 1
    while (num_blocks + step) * block_size <= _LONGEST:
        num_blocks += step
        boundaries.append(num_blocks * block_size)
        if num_blocks == _EVEN_SEGMENTS * step:
            step *= 2
    return boundaries
