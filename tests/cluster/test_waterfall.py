"""The start-up times of one server."""

from cluster.waterfall import Waterfall, process_age_s


class Clock:
    """A clock that stands still until told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stages_add_up_to_the_total() -> None:
    """Each stage lasts from the one before it, and the first from the start of the process."""
    clock = Clock()
    waterfall = Waterfall(0.5, clock)
    clock.now += 1.0
    waterfall.mark("resolve")
    clock.now += 5.0
    waterfall.mark_before("spawn", 4.0)
    waterfall.mark("load")

    assert str(waterfall) == "imports=0.5s resolve=1.0s spawn=1.0s load=4.0s"
    assert waterfall.total_s == 6.5


def test_another_clock_never_makes_a_stage_negative() -> None:
    """A load time that is longer than we have waited leaves nothing for the stage before it."""
    clock = Clock()
    waterfall = Waterfall(0.0, clock)
    clock.now += 2.0
    waterfall.mark_before("spawn", 9.0)
    waterfall.mark("load")

    assert str(waterfall) == "imports=0.0s spawn=0.0s load=2.0s"


def test_this_process_has_an_age() -> None:
    """Read from the kernel, so interpreter and imports count."""
    assert 0 < process_age_s() < 3600


def test_stages_of_another_process_follow_each_other_up_to_now() -> None:
    """Known by how long they took; what is left of the time is the stage before them."""
    clock = Clock()
    waterfall = Waterfall(0.5, clock)
    clock.now += 10.0
    waterfall.mark_chain("spawn", {"workers": 2.0, "weights": 3.0, "handshake": 1.0})

    assert str(waterfall) == "imports=0.5s spawn=4.0s workers=2.0s weights=3.0s handshake=1.0s"
    assert waterfall.total_s == 10.5
