"""Counts whose log lines get rarer."""

from engine.thinning import ThinnedCount


def test_powers_of_two_are_logged() -> None:
    """Everything counts; the first is told at once, and a thousand are ten lines."""
    thinned = ThinnedCount()
    told = [number for number in range(1, 1001) if thinned.add()]
    assert told == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert thinned.count == 1000
