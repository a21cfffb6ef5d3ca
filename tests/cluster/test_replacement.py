"""Whether a rank that is lost is started anew, and when."""

import pytest

from cluster.replacement import (
    CALM_S,
    MAX_DELAY_S,
    MAX_FAILED_STARTS,
    GiveUp,
    GoOn,
    Replacement,
    Restart,
)


@pytest.fixture
def ranks() -> Replacement:
    """Two that serve."""
    ranks = Replacement(2)
    ranks.serve()
    return ranks


def test_a_loss_is_made_good_at_once(ranks: Replacement) -> None:
    """Under the next epoch; meanwhile the other one serves."""
    assert ranks.take_loss(1, 0, 0.0) == Restart(1, 0.0)
    assert ranks.num_up == 1
    assert ranks.is_expected(1, 1)
    assert ranks.take_ready(1, 1)
    assert ranks.num_up == 2


def test_the_same_loss_is_taken_once(ranks: Replacement) -> None:
    """Whoever tells of it, and however late."""
    ranks.take_loss(1, 0, 0.0)
    assert ranks.take_loss(1, 0, 0.0) is None
    assert ranks.is_known(1, 0)
    ranks.take_ready(1, 1)
    assert ranks.take_loss(1, 0, 9.0) is None
    assert ranks.num_up == 2


def test_ready_of_another_incarnation_is_no_news(ranks: Replacement) -> None:
    """One that was given up may have been about to say it; and each API server says it."""
    ranks.take_loss(1, 0, 0.0)
    assert not ranks.take_ready(1, 0)
    assert ranks.take_ready(1, 1)
    assert not ranks.take_ready(1, 1)


def test_a_rank_that_is_lost_again_and_again_has_to_wait(ranks: Replacement) -> None:
    """Longer each time, up to a limit; and not at all after a calm time."""
    delays = []
    for epoch in range(8):
        verdict = ranks.take_loss(0, epoch, float(epoch))
        assert isinstance(verdict, Restart)
        delays.append(verdict.delay_s)
        ranks.take_ready(0, epoch + 1)
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_DELAY_S, MAX_DELAY_S]
    assert ranks.take_loss(1, 0, 8.0) == Restart(1, 0.0)
    assert ranks.take_loss(0, 8, 9.0 + CALM_S) == Restart(9, 0.0)


def test_a_rank_that_does_not_come_up_ends_the_server(ranks: Replacement) -> None:
    """At the third try in a row, with a reason; one that was up in between counts from zero."""
    assert isinstance(ranks.take_loss(0, 0, 0.0), Restart)
    for epoch in range(1, MAX_FAILED_STARTS):
        assert isinstance(ranks.take_loss(0, epoch, 0.0), Restart)
    assert ranks.take_ready(0, MAX_FAILED_STARTS)
    for epoch in range(MAX_FAILED_STARTS, 2 * MAX_FAILED_STARTS):
        assert isinstance(ranks.take_loss(0, epoch, 0.0), Restart)
    assert ranks.take_loss(0, 2 * MAX_FAILED_STARTS, 0.0) == GiveUp(
        "it has failed to start 3 times in a row"
    )
    assert not ranks.is_expected(0, 2 * MAX_FAILED_STARTS)


def test_what_is_hopeless_is_not_tried_again(ranks: Replacement) -> None:
    """A model or settings that were refused will be refused again."""
    ranks.take_loss(0, 0, 0.0)
    assert ranks.take_loss(0, 1, 0.0, is_hopeless=True) == GiveUp(None)


def test_before_it_serves_a_loss_is_a_start_that_failed() -> None:
    """As in the default mode."""
    ranks = Replacement(2)
    assert ranks.take_loss(0, 0, 0.0) == GiveUp(None)
    assert ranks.take_loss(0, 0, 0.0) is None


def test_a_draining_server_does_with_what_it_has(ranks: Replacement) -> None:
    """The other rank finishes the streams; without one the server ends at once."""
    assert ranks.take_loss(0, 0, 0.0, is_draining=True) == GoOn()
    assert ranks.num_up == 1
    assert ranks.take_loss(1, 0, 0.0, is_draining=True) == GiveUp(None)
