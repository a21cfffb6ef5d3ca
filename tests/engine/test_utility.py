"""The two ends of a utility call: types on the way out, types on the way back."""

import msgspec
import pytest

from engine.errors import RequestFailedError, WireError
from engine.utility import METHODS, Statistics, answer, make_call, read_answer
from engine.wire import SchedulerStats, UtilityCall, UtilityOutput


class Recorder:
    """A target that notes what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def statistics(self) -> Statistics:
        return Statistics(SchedulerStats(1, 2, 0.5), [])

    def reset_prefix_cache(self) -> bool:
        raise RequestFailedError("not now")

    def profile(self, is_start: bool, directory: str) -> None:
        self.calls.append((is_start, directory))

    def drop_client(self, client_index: int, arrived_before: float) -> int:
        self.calls.append((client_index, arrived_before))
        return 3


def test_a_call_arrives_with_its_arguments_and_its_result_returns() -> None:
    """What one side makes the other runs, and the answer has the call's id and type."""
    target = Recorder()

    answers = [
        answer(make_call(0, call_id, method, args), target)
        for call_id, (method, args) in enumerate([("statistics", ()), ("profile", (True, "d"))])
    ]

    assert [a.call_id for a in answers] == [0, 1]
    assert read_answer("statistics", answers[0]) == target.statistics()
    assert read_answer("profile", answers[1]) is None
    assert target.calls == [(True, "d")]


def test_a_failure_comes_back_as_text() -> None:
    """A method that cannot do its work fails the call, not the engine core."""
    failed = answer(make_call(0, 7, "reset_prefix_cache", ()), Recorder())

    assert failed.failure == "not now"
    with pytest.raises(RequestFailedError, match="reset_prefix_cache failed: not now"):
        read_answer("reset_prefix_cache", failed)


def test_errors_that_end_the_core_pass() -> None:
    """A dead executor is no failed call."""

    class Broken(Recorder):
        def statistics(self) -> Statistics:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        answer(make_call(0, 7, "statistics", ()), Broken())


def test_a_wrong_call_does_not_leave_the_api_server() -> None:
    """An unknown name and wrong arguments are found where they are made."""
    with pytest.raises(WireError, match="no utility method 'close'; there are statistics"):
        make_call(0, 1, "close", ())
    with pytest.raises(WireError, match="wrong arguments for profile"):
        make_call(0, 1, "profile", ("yes", "d"))


def test_a_result_of_another_type_is_refused() -> None:
    """An engine of another version cannot pass off something else."""
    with pytest.raises(WireError, match="undecodable result of statistics"):
        read_answer("statistics", UtilityOutput(1, result=msgspec.Raw(b"\xc3")))


@pytest.mark.row("S-50")
@pytest.mark.parametrize("method", METHODS)
def test_hostile_arguments_fail_the_call_only(method: str) -> None:
    """Nesting, nil, no msgpack at all: a failure text."""
    for raw in (b"\x91" * 5000, b"\xc0", b"\xc1", b"", b"\xdd\xff\xff\xff\xff"):
        failed = answer(UtilityCall(0, 1, method, msgspec.Raw(raw)), Recorder())
        assert "wrong arguments" in str(failed.failure)
