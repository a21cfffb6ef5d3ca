"""The order in which requests are begun, and who is turned away before."""

import asyncio
import logging
from typing import Any, cast

import pytest

from api.config import ApiConfig
from api.engine_client import EngineClient
from api.front_door import _BEGUN_IN_A_TURN, _LINES_A_SECOND, FrontDoor
from api.service import Service

POST = {"method": "POST", "path": "/v1/completions", "headers": []}


def make_door(**config: Any) -> FrontDoor:
    service = Service(ApiConfig(served_model_names=("m",), **config), EngineClient(1))
    service.close()
    service.serve(cast(Any, None))
    return FrontDoor(service, {("POST", "/v1/completions")})


def test_a_turn_begins_so_many_and_the_others_follow_in_order() -> None:
    """Whatever else there is to do, a probe among it, comes in between."""

    async def main() -> list[object]:
        door, seen, loop = make_door(), list[object](), asyncio.get_running_loop()
        for number in range(100):
            door.begin(lambda number=number: seen.append(number))  # type: ignore[misc]
        assert seen == [*range(_BEGUN_IN_A_TURN)]
        loop.call_soon(seen.append, "probe")
        for _ in range(2 + 100 // _BEGUN_IN_A_TURN):
            await asyncio.sleep(0)
        assert seen.index("probe") < 3 * _BEGUN_IN_A_TURN
        seen.remove("probe")
        door.begin(lambda: seen.append("last"))
        return seen

    assert asyncio.run(main()) == [*range(100), "last"]


def test_those_who_wait_for_their_turn_count() -> None:
    """Or a thousand that come at once would all find an empty server."""

    async def main() -> None:
        door = make_door(max_num_queued_reqs=3)
        for _ in range(3):
            assert door.refusal(POST) is None
            door.begin(lambda: None)
        refused = door.refusal({**POST, "headers": [(b"x-request-id", b"mine")]})
        assert refused is not None
        failure, body = refused
        assert failure.status == 503
        assert failure.headers["x-request-id"] == "mine"
        assert b"overloaded" in body

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v1/completions", ["x-request-id"]),
        ("/v1/messages", ["x-request-id", "request-id"]),
    ],
)
def test_who_is_turned_away_learns_the_id_and_the_log_has_it(
    path: str, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In the headers and in the access log, as with every other answer."""
    caplog.set_level(logging.INFO, "api.edge")

    async def main() -> None:
        door = make_door(max_num_queued_reqs=1)
        door.begin(lambda: None)
        scope = {"method": "POST", "path": path, "headers": [(b"x-request-id", b"mine")]}
        refused = door.refusal(scope)
        assert refused is not None
        assert [name for name, value in refused[0].headers.items() if value == "mine"] == names

    asyncio.run(main())
    [record] = caplog.records
    assert record.getMessage() == f'"POST {path}" 503 Service Unavailable 0 ms'


def test_of_very_many_who_are_turned_away_the_log_has_the_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Under such load a line for each would cost more than it says."""
    caplog.set_level(logging.INFO, "api.edge")

    async def main() -> None:
        door = make_door(max_num_queued_reqs=1)
        door.begin(lambda: None)
        for _ in range(3 * _LINES_A_SECOND):
            assert door.refusal(POST) is not None
        door._lines._end_second()
        assert door.refusal(POST) is not None

    asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == _LINES_A_SECOND + 2
    assert lines[-2] == f"{2 * _LINES_A_SECOND} more requests were refused within a second"


def test_only_what_gives_work_is_turned_away() -> None:
    """And browsers hear it from further inside, with the headers that they need."""
    door = make_door()
    assert door.is_for(POST)
    assert not door.is_for({**POST, "method": "GET"})
    assert not door.is_for({**POST, "path": "/v1/models"})

    async def main() -> None:
        door = make_door(max_num_queued_reqs=1, allowed_origins=("https://a.org",))
        door.begin(lambda: None)
        assert door.refusal(POST) is None

    asyncio.run(main())
