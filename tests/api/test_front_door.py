"""The order in which requests are begun, and who is turned away before."""

import asyncio
from typing import Any, cast

from api.config import ApiConfig
from api.engine_client import EngineClient
from api.front_door import _BEGUN_IN_A_TURN, FrontDoor
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
