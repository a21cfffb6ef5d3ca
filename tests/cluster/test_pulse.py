"""Whether API servers still answer the command."""

from cluster.pulse import INTERVAL_S, SILENCE_S, Pulse


def run(pulse: Pulse, start: float, end: float, *answering: int) -> int | None:
    """Look ten times a second, as the command does; who hung first."""
    for tick in range(int(start * 10), int(end * 10)):
        now = tick / 10
        for index in pulse.due(now):
            if index in answering:
                pulse.take(index, now)
        if (hung := pulse.hung(now)) is not None:
            return hung
    return None


def test_who_answers_lives_and_who_does_not_has_hung() -> None:
    """After ten seconds; before it serves nobody is asked."""
    pulse = Pulse()
    pulse.take(0, 0.0)
    assert run(pulse, 0, 100, 0) is None
    pulse.take(1, 100.0)
    assert run(pulse, 100, 100 + SILENCE_S, 0) is None
    assert run(pulse, 100 + SILENCE_S, 100 + SILENCE_S + 2 * INTERVAL_S, 0) == 1


def test_nobody_is_asked_twice_before_the_answer() -> None:
    """One that is stopped for a moment finds one question."""
    pulse = Pulse()
    pulse.take(0, 0.0)
    assert pulse.due(INTERVAL_S) == [0]
    assert pulse.due(3 * INTERVAL_S) == []
    pulse.take(0, 4 * INTERVAL_S)
    assert pulse.due(4.5 * INTERVAL_S) == []
    assert pulse.due(5 * INTERVAL_S) == [0]


def test_who_has_slept_itself_gives_a_new_chance() -> None:
    """The answers of that time have yet to be read."""
    pulse = Pulse()
    pulse.take(0, 0.0)
    assert run(pulse, 0, 3) is None
    assert pulse.hung(60.0) is None
    assert run(pulse, 60, 60 + SILENCE_S + 1) == 0


def test_a_newcomer_has_to_serve_in_time() -> None:
    """One that has begun to serve is asked like all others, and one that has died is forgotten."""
    pulse = Pulse()
    for index in range(3):
        pulse.expect(index, 10.0)
    assert pulse.late(10.0) is None
    pulse.take(0, 9.0)
    pulse.forget(1)
    assert pulse.late(11.0) == 2
    pulse.forget(2)
    assert pulse.late(11.0) is None
