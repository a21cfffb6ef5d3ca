"""Noise is a pure function of the key and the number of draws before."""

import numpy as np

from workers import noise


def test_a_number_depends_on_its_key_and_place_alone() -> None:
    """Row by row gives what the whole batch gives."""
    keys = np.array([noise.key_of_seed(seed) for seed in range(50)], np.uint64)
    counters = np.arange(50)

    together = noise.uniforms(keys, counters, 3)
    alone = [noise.uniforms(keys[i : i + 1], counters[i : i + 1], 3)[0] for i in range(50)]

    assert np.array_equal(together, alone)


def test_numbers_are_the_same_on_every_machine_and_version() -> None:
    """A stream that moves to another server continues with the same noise."""
    key = noise.key_of_seed(42)

    numbers = noise.uniforms(np.array([key], np.uint64), np.zeros(1, np.int64), 3)[0]

    assert key == 13679457532755275413
    assert numbers.tolist() == [0.34329192209867354, 0.9557467261317437, 0.48634953628166866]


def test_numbers_are_uniform_along_a_stream_and_across_seeds() -> None:
    """A hundred bins fill evenly, over one seed's draws as over the first draws of all seeds."""
    keys = np.array([noise.key_of_seed(seed) for seed in range(20_000)], np.uint64)
    along = noise.uniforms(np.repeat(keys[:1], 10_000), np.arange(10_000), 2).ravel()
    across = noise.uniforms(keys, np.zeros(20_000, np.int64), 2)[:, 1]

    for numbers in (along, across):
        assert numbers.min() > 0.0
        assert numbers.max() < 1.0
        bins = np.bincount((numbers * 100).astype(int), minlength=100)
        assert ((bins - 200) ** 2 / 200).sum() < 99 + 5 * np.sqrt(2 * 99)


def test_neighbouring_seeds_are_unrelated() -> None:
    """The streams of seeds 0 to 99 do not correlate."""
    keys = np.array([noise.key_of_seed(seed) for seed in range(100)], np.uint64)
    streams = np.stack([noise.uniforms(np.repeat(k, 500), np.arange(500), 2).ravel() for k in keys])

    correlation = np.corrcoef(streams) - np.eye(100)

    assert abs(correlation).max() < 5 / np.sqrt(1000)


def test_negative_and_largest_seeds_have_keys_of_their_own() -> None:
    """Every seed that the API takes has its own stream."""
    seeds = [-(2**63), -1, 0, 1, 2**63 - 1]

    assert len({noise.key_of_seed(seed) for seed in seeds}) == len(seeds)
