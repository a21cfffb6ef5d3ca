"""Who is let in, and who is told when to come back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.admission import Admission, Flow
from engine.errors import InvalidRequestError, OverloadedError


class World:
    """An admission with a clock that jumps, and engine cores that are just a number."""

    def __init__(self, max_requests: int | None = None, max_tokens: int | None = None) -> None:
        self.now = 100.0
        self.num_sent = 0
        self.flow = Flow(lambda: self.now)
        self.admission = Admission(
            max_requests, max_tokens, lambda: self.num_sent, self.flow, lambda: self.now
        )

    def send(self, num_sequences: int = 1) -> None:
        with self.admission.place(num_sequences):
            self.num_sent += num_sequences

    def finish(self, count: int = 1, each_s: float = 0.0) -> None:
        for _ in range(count):
            self.now += each_s
            self.num_sent -= 1
            self.flow.on_finished()

    def refused(self, num_sequences: int = 1) -> OverloadedError:
        with pytest.raises(OverloadedError) as caught:
            self.send(num_sequences)
        return caught.value


def test_a_full_server_refuses_and_a_place_that_is_free_again_is_given() -> None:
    """One in, one out."""
    world = World(max_requests=2)
    world.send()
    world.send()
    assert "try again later" in str(world.refused())

    world.finish()
    world.send()

    world.refused()
    assert world.admission.num_refused == {"max_num_queued_reqs": 2, "max_num_queued_tokens": 0}


def test_each_sequence_counts() -> None:
    """Four continuations are four places; what does not fit now may fit later."""
    world = World(max_requests=5)
    world.send(4)
    world.refused(2)
    world.send(1)


def test_what_never_fits_is_the_callers_mistake() -> None:
    """A 400 rather than a 503, which would be tried again for ever."""
    with pytest.raises(InvalidRequestError, match="6 sequences; this server has 5"):
        World(max_requests=5).send(6)


def test_what_is_being_tokenized_counts() -> None:
    """Ten thousand texts in a queue for a thread are a queue as well."""
    world = World(max_requests=3)
    with world.admission.place(3):
        world.refused()
    world.send(3)


def test_a_place_is_given_back_if_its_request_fails() -> None:
    """Its client has gone, perhaps, before anything was sent."""
    world = World(max_requests=1)
    with pytest.raises(RuntimeError), world.admission.place(1):
        raise RuntimeError
    assert world.admission.num_in_flight == 0


def test_prompt_tokens_wait_until_they_are_computed() -> None:
    """Who comes when there are too many is refused; a long prompt that comes before is not."""
    world = World(max_tokens=100)
    world.send()
    world.flow.on_sent(10_000)
    assert "prompt tokens" in str(world.refused())

    world.flow.on_prefilled(10_000)
    world.send()

    assert world.admission.num_refused["max_num_queued_tokens"] == 1


def test_without_limits_nobody_is_refused() -> None:
    """Only a server has them; they are not the engine's."""
    world = World()
    world.flow.on_sent(1 << 40)
    for _ in range(1000):
        world.send()
    assert not world.admission.shedding


def test_when_to_come_back_is_when_there_is_room() -> None:
    """By how fast requests end: ten a second, so the tenth of those who wait comes in a second."""
    world = World(max_requests=50)
    for _ in range(50):
        world.send()
    world.finish(40, each_s=0.1)
    for _ in range(40):
        world.send()

    times = [world.refused().retry_after_s for _ in range(40)]

    assert times[0] == 1
    assert times[-1] == pytest.approx(4, abs=1)


def test_those_who_are_let_in_first_make_nobody_wait_longer() -> None:
    """In a burst, requests that have been let in and count nowhere yet are ahead of each that is
    refused: they take places, and no room in the line."""
    plain, burst = World(max_requests=10), World(max_requests=10)
    for world in (plain, burst):
        for _ in range(10):
            world.send()
        world.finish(5, each_s=0.1)
    for _ in range(5):
        plain.send()
    answers = [
        [world.admission.refusal(1, num_ahead) for _ in range(30)]
        for world, num_ahead in ((plain, 0), (burst, 5))
    ]
    times = [[each.retry_after_s for each in some if each is not None] for some in answers]

    assert times[0] == times[1]
    assert len(times[0]) == 30


def test_many_tokens_take_longer_to_wait_for() -> None:
    """What is too much, by how fast prompts are computed."""
    world = World(max_tokens=1000)
    world.flow.on_sent(500)
    world.now += 1.0
    world.flow.on_prefilled(500)
    world.flow.on_sent(6000)
    assert world.refused().retry_after_s == pytest.approx(10, abs=2)


def test_those_for_whom_too_many_tokens_wait_do_not_all_come_back_at_once() -> None:
    """Each brings a prompt, and is told to come one prompt later than who was refused before."""
    world = World(max_tokens=1000)
    world.flow.on_sent(500)
    world.now += 1.0
    world.flow.on_prefilled(500)
    for _ in range(3):
        world.flow.on_sent(1000)

    times = [world.refused().retry_after_s for _ in range(5)]

    assert times[0] == pytest.approx(4, abs=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == pytest.approx([2.0] * 4, abs=1)
    assert times[-1] - times[0] == pytest.approx(8, abs=1)


def test_load_is_shed_until_there_is_some_room() -> None:
    """Probes are not told otherwise with every request that ends."""
    world = World(max_requests=10)
    for _ in range(10):
        assert not world.admission.shedding
        world.send()
    assert world.admission.shedding

    world.finish()
    assert not world.admission.shedding  # nine tenths

    world = World(max_requests=100)
    world.send(100)
    assert world.admission.shedding
    world.finish(9)
    assert world.admission.shedding
    world.finish()
    assert not world.admission.shedding


def test_the_limit_that_sheds_is_named_until_there_is_room() -> None:
    """Operators raise that one: with few requests in flight, prompt tokens may be too many."""
    world = World(max_requests=10, max_tokens=100)
    world.send()
    world.flow.on_sent(120)
    assert world.admission.shedding == "max_num_queued_tokens"
    told = world.admission.how_full("max_num_queued_tokens")
    assert told.startswith("120 prompt tokens wait, of 100 ")
    assert "--max-num-queued-tokens" in told

    world.flow.on_prefilled(25)
    assert world.admission.shedding == "max_num_queued_tokens"
    world.flow.on_prefilled(95)
    assert world.admission.shedding is None

    world.send(9)
    assert world.admission.shedding == "max_num_queued_reqs"
    told = world.admission.how_full("max_num_queued_reqs")
    assert told.startswith("10 requests are in flight, of 10 ")


@given(
    limit=st.integers(1, 20),
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 25), st.floats(0, 5)), max_size=80),
)
def test_the_limit_holds_whatever_comes(limit: int, moves: list[tuple[bool, int, float]]) -> None:
    """Never more in flight than it says, nobody refused for whom there is room, and each who is
    has a time to come back."""
    world, times = World(max_requests=limit), list[int]()
    for is_new, count, gap_s in moves:
        world.now += gap_s
        before = world.num_sent
        if not is_new:
            world.finish(min(count, before))
            continue
        try:
            world.send(count)
        except OverloadedError as refusal:
            assert before + count > limit >= count
            times.append(refusal.retry_after_s)
        except InvalidRequestError:
            assert count > limit
        assert world.admission.num_in_flight == world.num_sent <= limit
    assert all(1 <= each <= 60 for each in times)
