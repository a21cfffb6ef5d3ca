"""One rank's share of waves. How ranks and coordinator come to rest together is told in
`tests/cluster/test_coordinator.py`."""

import pytest

from engine.waves import Share, Waves
from engine.wire import StartWave


def running(wave: int) -> Waves:
    waves = Waves(1)
    waves.take_start(StartWave(wave))
    return waves


def test_a_request_starts_a_paused_rank_which_says_so() -> None:
    """Once: the next one finds it running."""
    waves = Waves(1)
    assert not waves.is_running
    assert waves.take_request(wave=0) == 0
    assert waves.is_running
    assert waves.take_request(wave=0) is None


@pytest.mark.parametrize(("sent_in", "started"), [(4, 6), (6, 6), (9, 9)])
def test_a_request_of_another_wave_starts_the_rank_as_well(sent_in: int, started: int) -> None:
    """What its API server knew may be old; or the rank is new and knows less."""
    waves = running(5)
    waves.take_agreement(Share(False, 5))

    assert waves.take_request(sent_in) == started
    assert waves.current_wave == started


def test_start_dp_wave_starts_a_paused_rank() -> None:
    """In its own wave, or in a later one that it has not heard of."""
    assert running(0).is_running
    assert running(3).current_wave == 3


@pytest.mark.parametrize("start", [StartWave(5), StartWave(0), StartWave(6, exclude_engine=1)])
def test_start_dp_wave_is_ignored_where_it_is_late_or_for_others(start: StartWave) -> None:
    """The wave it names is over, or the rank has started it itself: it stays paused."""
    waves = running(5)
    waves.take_agreement(Share(False, 5))
    waves.take_start(start)

    assert (waves.current_wave, waves.is_running) == (6, False)


def test_dummy_steps_are_for_running_ranks_without_work() -> None:
    """A paused rank computes nothing."""
    assert running(0).needs_dummy_step(has_work=False)
    assert not running(0).needs_dummy_step(has_work=True)
    assert not Waves(1).needs_dummy_step(has_work=False)


def test_a_wave_ends_when_no_rank_has_work() -> None:
    """Then all pause before the next one; while anybody has work all go on."""
    waves = running(2)
    assert waves.share(has_work=False) == Share(False, 2)
    assert waves.take_agreement(Share(True, 2)) is None
    assert (waves.current_wave, waves.is_running) == (2, True)
    assert waves.take_agreement(Share(False, 2)) == 2
    assert (waves.current_wave, waves.is_running) == (3, False)


def test_ranks_agree_on_the_number_of_their_wave() -> None:
    """The highest counts, whether the wave goes on or is over."""
    waves = running(0)
    waves.take_agreement(Share(True, 7))
    assert waves.current_wave == 7
    assert waves.take_agreement(Share(False, 8)) == 8
    assert waves.current_wave == 9
