"""Who is next among those that wait."""

import random
import time

import pytest

from engine.config import Policy
from engine.request import Request
from engine.request_queue import RequestQueue, make_queue
from tests.helpers.engine_core import make_request


def make(*keys: tuple[float, ...]) -> list[Request]:
    """A request for each sort key, all different."""
    requests = []
    for number, key in enumerate(keys):
        message = make_request(str(number))
        assert message.prompt_token_ids is not None
        assert message.sampling_params is not None
        request = Request(
            message.request_id,
            message.prompt_token_ids,
            message.sampling_params,
            max_model_len=100,
            block_size=4,
        )
        request.sort_key = (*key, number)
        requests.append(request)
    return requests


def drain(queue: RequestQueue) -> list[str]:
    order = []
    while queue:
        first = queue.peek()
        assert queue.pop() is first
        order.append(first.request_id)
    return order


def test_first_come_is_first_served() -> None:
    """Without priorities the order is that of arrival at the engine core."""
    queue = make_queue("fcfs")
    for request in make((), (), ()):
        queue.add(request)
    assert drain(queue) == ["0", "1", "2"]


def test_lower_priority_then_earlier_arrival_is_served_first() -> None:
    """The heap orders by priority, then arrival time, then order of coming."""
    queue = make_queue("priority")
    for request in make((1, 0.0), (0, 9.0), (0, 3.0), (0, 3.0), (-1, 9.0)):
        queue.add(request)
    assert drain(queue) == ["4", "2", "3", "1", "0"]


def test_preempted_requests_go_before_those_that_came_later() -> None:
    """Preempted newest first, they stand at the front in their old order."""
    for policy in ("fcfs", "priority"):
        queue = make_queue("fcfs" if policy == "fcfs" else "priority")
        old, new, last = make((0, 0.0), (0, 1.0), (0, 2.0))
        queue.add(last)
        queue.put_back(new)
        queue.put_back(old)
        assert drain(queue) == ["0", "1", "2"], policy


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_removed_requests_never_come_up(policy: Policy) -> None:
    """Whatever is removed, the others keep their order."""
    queue, requests = make_queue(policy), make(*[(0, float(n % 7)) for n in range(200)])
    for request in requests:
        queue.add(request)
    gone = set(random.Random(1).sample(requests, 150))
    for request in gone:
        queue.remove(request)
    assert len(queue) == len(set(queue)) == 50
    left = [request for request in requests if request not in gone]
    if policy == "priority":
        left.sort(key=lambda request: request.sort_key)
    assert drain(queue) == [request.request_id for request in left]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_ten_thousand_waiting_requests_are_removed_at_once(policy: Policy) -> None:
    """A wave of aborts must not stop the engine: no search through the queue for each."""
    queue, requests = make_queue(policy), make(*[(0, 0.0)] * 10_000)
    for request in requests:
        queue.add(request)
    began = time.perf_counter()
    for request in reversed(requests):
        queue.remove(request)
    assert time.perf_counter() - began < 1.0  # quadratic would be minutes
    assert not queue
