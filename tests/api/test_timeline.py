"""Queue, prefill and decode times from the core's stamps."""

import pytest

from api.timeline import Timeline
from engine.codec import pack_tokens
from engine.wire import EngineCoreEvent, EngineCoreOutput, EventKind, OutputDetails

QUEUED, SCHEDULED, PREEMPTED = EventKind.QUEUED, EventKind.SCHEDULED, EventKind.PREEMPTED


def output(*events: tuple[EventKind, float], num_tokens: int = 0) -> EngineCoreOutput:
    details = OutputDetails(events=[EngineCoreEvent(*event) for event in events])
    return EngineCoreOutput("r", pack_tokens([7] * num_tokens), details=details)


def test_times_of_an_undisturbed_request() -> None:
    """Waiting, then running up to the first token, then up to the last."""
    timeline = Timeline()

    timeline.update(output((QUEUED, 10.0), (SCHEDULED, 12.0), num_tokens=1), 15.0)
    timeline.update(output(num_tokens=1), 16.0)
    timeline.update(output(num_tokens=1), 18.0)

    assert (timeline.queue_s, timeline.prefill_s, timeline.decode_s) == (2.0, 3.0, 3.0)


def test_waiting_after_a_preemption_is_queue_time() -> None:
    """Also between tokens; recomputing what was thrown away is decode time."""
    timeline = Timeline()

    timeline.update(output((QUEUED, 0.0), (SCHEDULED, 1.0), num_tokens=1), 3.0)
    timeline.update(output((PREEMPTED, 4.0)), 4.5)
    timeline.update(output((SCHEDULED, 9.0), num_tokens=1), 11.0)

    assert (timeline.queue_s, timeline.prefill_s, timeline.decode_s) == (6.0, 2.0, 3.0)
    assert timeline.num_preemptions == 1


def test_preemption_during_prefill_does_not_lengthen_prefill() -> None:
    """Only running time counts: 1 s before the preemption and 3 s after it."""
    timeline = Timeline()

    timeline.update(output((QUEUED, 0.0), (SCHEDULED, 2.0)), 2.5)
    timeline.update(output((PREEMPTED, 3.0)), 3.5)
    timeline.update(output((SCHEDULED, 7.0), num_tokens=1), 10.0)

    assert (timeline.queue_s, timeline.prefill_s, timeline.decode_s) == (6.0, 4.0, 0.0)


def test_another_cores_clock_bends_no_time() -> None:
    """What passes between the last word of one and the first of the other counts nowhere."""
    timeline = Timeline()

    timeline.update(output((QUEUED, 100.0), (SCHEDULED, 101.0), num_tokens=1), 103.0)
    timeline.update(output(num_tokens=1), 104.0)
    timeline.leave()
    timeline.update(output((QUEUED, 5.0), (SCHEDULED, 6.0), num_tokens=1), 9.0)
    timeline.update(output(num_tokens=1), 10.0)

    assert (timeline.queue_s, timeline.prefill_s, timeline.decode_s) == (2.0, 2.0, 5.0)


@pytest.mark.parametrize("num_preemptions", [0, 1, 3])
def test_the_three_times_add_up(num_preemptions: int) -> None:
    """From QUEUED to the last token, whatever happened in between."""
    timeline = Timeline()
    now = 1.0
    timeline.update(output((QUEUED, now), (SCHEDULED, now + 0.5), num_tokens=1), now + 1.0)
    for _ in range(num_preemptions):
        now += 2.0
        timeline.update(output((PREEMPTED, now)), now)
        timeline.update(output((SCHEDULED, now + 0.25), num_tokens=1), now + 0.75)
    assert timeline.last_token_at is not None

    total = timeline.queue_s + timeline.prefill_s + timeline.decode_s

    assert total == pytest.approx(timeline.last_token_at - 1.0)


def test_request_that_never_ran_has_no_times() -> None:
    """One that was aborted while it waited."""
    timeline = Timeline()

    timeline.update(output((QUEUED, 5.0)), 5.0)

    assert not timeline.was_scheduled
    assert timeline.first_token_at is None
