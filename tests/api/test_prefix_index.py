"""Which rank is believed to hold which prefix."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.prefix_index import Matches, PrefixIndex
from engine.codec import Array

BLOCK = 16
CACHE_TOKENS = 4000


def prompt(seed: int, num_tokens: int) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 17, num_tokens).astype("<u4")


def make_index(num_ranks: int = 3, **options: int) -> PrefixIndex:
    index = PrefixIndex(num_ranks, BLOCK, **options)
    for rank in range(num_ranks):
        index.restart(rank, CACHE_TOKENS)
    return index


def held(index: PrefixIndex, tokens: Array, salt: str | None = None) -> list[int]:
    return index.find(index.keys(tokens, salt)).num_tokens


def claim(index: PrefixIndex, rank: int, tokens: Array, salt: str | None = None) -> None:
    index.claim(rank, index.keys(tokens, salt))


@pytest.mark.parametrize("num_tokens", [0, 15, 16, 17, 500, 2048, 2049, 30_000, 100_000])
def test_prompt_is_held_but_for_a_fifth_of_its_end(num_tokens: int) -> None:
    """Tracked prefixes lie as close as that; short ones end with every block."""
    index = make_index()
    claim(index, 1, prompt(0, num_tokens))

    length = held(index, prompt(0, num_tokens))[1]

    assert num_tokens - max(BLOCK - 1, num_tokens // 5) <= length <= num_tokens
    assert length % BLOCK == 0
    assert held(index, prompt(0, num_tokens)) == [0, length, 0]


@pytest.mark.parametrize("common", [100, 1000, 5000, 60_000])
def test_common_start_is_found_and_no_more(common: int) -> None:
    """Two prompts that part after some tokens share at most those, whatever comes later."""
    index = make_index()
    start = prompt(0, common)
    claim(index, 2, np.concatenate([start, prompt(1, 3000)]))

    length = held(index, np.concatenate([start, prompt(2, 3000)]))[2]

    assert common - max(BLOCK, common // 5) <= length <= common


def test_each_rank_has_its_own_length() -> None:
    """A choice weighs the longest against the less busy."""
    index = make_index()
    claim(index, 0, prompt(0, 64))
    claim(index, 1, prompt(0, 128))

    assert held(index, prompt(0, 300)) == [64, 128, 0]


def test_salt_keeps_tenants_apart() -> None:
    """Neither finds what the other has sent: the engine cores share nothing either."""
    index = make_index()
    claim(index, 0, prompt(0, 64), "mine")

    assert held(index, prompt(0, 64), "yours") == [0, 0, 0]
    assert held(index, prompt(0, 64)) == [0, 0, 0]
    assert held(index, prompt(0, 64), "mine") == [64, 0, 0]


def test_reset_cache_voids_all_claims_of_that_rank_alone() -> None:
    """As often as it happens; and what is claimed afterwards counts."""
    index = make_index()
    for _ in range(20):
        for rank in (0, 1):
            claim(index, rank, prompt(0, 64))
        claim(index, 1, prompt(1, 64))

        index.forget(1)

        assert held(index, prompt(0, 64)) == [64, 0, 0]
        assert held(index, prompt(1, 64)) == [0, 0, 0]
    index.restart(0, CACHE_TOKENS)
    assert held(index, prompt(0, 64)) == [0, 0, 0]
    claim(index, 0, prompt(0, 64))
    assert held(index, prompt(0, 64)) == [64, 0, 0]


def test_claim_is_void_once_the_cache_has_been_written_over() -> None:
    """Engine cores evict the least recently used; their counters say how much they write."""
    index = make_index()
    claim(index, 0, prompt(0, 64))
    index.take_written(0, CACHE_TOKENS // 2)
    claim(index, 0, prompt(1, 64))

    index.take_written(0, CACHE_TOKENS)

    assert held(index, prompt(0, 64)) == [0, 0, 0]
    assert held(index, prompt(1, 64)) == [64, 0, 0]
    index.take_written(0, 10 * CACHE_TOKENS)
    assert held(index, prompt(1, 64)) == [0, 0, 0]


def test_prefix_in_use_does_not_grow_old() -> None:
    """Whoever sends it again keeps it in the rank's cache."""
    index = make_index()
    for written in range(0, 5 * CACHE_TOKENS, CACHE_TOKENS // 8):
        index.take_written(0, written)
        claim(index, 0, prompt(0, 64))
        assert held(index, prompt(0, 64)) == [64, 0, 0]


def test_missing_prefix_casts_doubt_on_old_claims_of_that_rank() -> None:
    """It forgets faster than it writes, so what is as old is gone as well."""
    index = make_index()
    for rank in (0, 1):
        claim(index, rank, prompt(0, 64))
        index.take_written(rank, CACHE_TOKENS // 4)
    claim(index, 1, prompt(1, 64))
    matches = index.find(index.keys(prompt(0, 64)))

    index.doubt(1, matches.claimed_at[1])

    assert held(index, prompt(0, 64)) == [64, 0, 0]
    assert held(index, prompt(1, 64)) == [0, 64, 0]


def test_claim_of_a_moment_ago_is_not_doubted() -> None:
    """Its prompt may wait to be computed: two of a kind that come together both find nothing."""
    index = make_index()
    claim(index, 0, prompt(0, 64))
    matches = index.find(index.keys(prompt(0, 64)))

    for _ in range(4):
        index.doubt(0, matches.claimed_at[0])

    assert held(index, prompt(0, 64)) == [64, 0, 0]


def test_memory_is_bounded() -> None:
    """The least recently used prefixes go, and the whole stays as small as it was."""
    index = make_index(max_prefixes=5000)
    for seed in range(300):
        claim(index, seed % 3, prompt(seed, 500))
    tracemalloc.start()
    for seed in range(300, 900):
        claim(index, seed % 3, prompt(seed, 500))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(index) == 5000
    assert held(index, prompt(0, 500)) == [0, 0, 0]
    assert held(index, prompt(899, 500)) == [0, 0, 448]
    assert grown < 2_000_000


def test_shared_start_outlives_the_ends_that_follow_it() -> None:
    """A system prompt that everybody sends stays known, however much comes and goes behind it."""
    index = make_index(max_prefixes=2000)
    start = prompt(0, 256)
    for seed in range(1, 2000):
        claim(index, 0, np.concatenate([start, prompt(seed, 100)]))
        assert held(index, start)[0] == 256


class Model:
    """What the index should know, told without hashes, bounds and shortcuts."""

    def __init__(self, num_ranks: int) -> None:
        self.claims: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]

    def held(self, tokens: tuple[int, ...]) -> list[int]:
        return [max((common(c, tokens) for c in claims), default=0) for claims in self.claims]


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Whole blocks, in tokens. So short that each block is tracked."""
    length = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return length // 2 * 2


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["claim", "claim", "claim", "forget", "look"]),
            st.integers(0, 2),
            st.lists(st.integers(0, 1), max_size=12).map(tuple),
        ),
        max_size=40,
    )
)
def test_claims_and_resets_add_up(steps: list[tuple[str, int, tuple[int, ...]]]) -> None:
    """In any order, each rank is believed to hold just what it was sent since its last reset."""
    index, model = PrefixIndex(3, 2), Model(3)
    for what, rank, tokens in steps:
        keys = index.keys(np.array(tokens, dtype="<u4"))
        if what == "claim":
            index.claim(rank, keys)
            model.claims[rank].append(tokens)
        elif what == "forget":
            index.forget(rank)
            model.claims[rank].clear()
        assert index.find(keys).num_tokens == model.held(tokens)


def test_nothing_is_held_of_no_prompt() -> None:
    """Ranks without a claim hold nothing since never."""
    assert make_index().find([]) == Matches.nothing(3)
