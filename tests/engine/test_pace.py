"""When the next step should be planned."""

import pytest

from engine.pace import LEAD_S, MARGIN, Pace


def test_a_size_that_has_not_run_is_planned_ahead_at_once() -> None:
    """Nobody knows how long it takes, and workers should not wait."""
    pace = Pace()
    pace.begin(100, 5.0)
    assert pace.seconds_left(5.0) <= 0


def test_the_plan_is_due_shortly_before_the_step_should_end() -> None:
    """By how long the last step of about as many tokens took."""
    pace = Pace()
    pace.begin(40, 5.0)
    pace.end(7.0)
    pace.begin(35, 10.0)
    left = 2.0 * (1 - MARGIN) - LEAD_S
    assert pace.seconds_left(10.0) == pytest.approx(left)
    assert pace.seconds_left(11.0) == pytest.approx(left - 1.0)
    assert pace.seconds_left(12.0) < 0


def test_short_steps_are_planned_ahead_at_once() -> None:
    """Planning takes about as long as they do."""
    pace = Pace()
    pace.begin(1, 0.0)
    pace.end(LEAD_S)
    pace.begin(1, 1.0)
    assert pace.seconds_left(1.0) <= 0


def test_prompts_and_decodes_are_told_apart() -> None:
    """After a long prompt the next decode is not expected to take as long."""
    pace = Pace()
    for num_tokens, seconds in ((1, 0.04), (2000, 3.0)):
        pace.begin(num_tokens, 0.0)
        pace.end(seconds)
    pace.begin(1, 10.0)
    assert 0 < pace.seconds_left(10.0) < 0.04
    pace.begin(1500, 20.0)
    assert 2.0 < pace.seconds_left(20.0) < 3.0
