"""What a client says about ranks, and what it is told."""

import re
from collections.abc import Iterator

import httpx
import pytest

from api import route_headers
from api.load_balancer import Route
from engine.errors import InvalidRequestError
from tests.helpers.fake_engine import endless_answer
from tests.helpers.http_server import HttpServer, serving, wait_for

ENTRY = re.compile(r"rank=(\d+); matched=(\d+); queue=(\d+); rule=(\w+)")


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving(num_engines=2) as server:
        yield server


def entries(response: httpx.Response) -> list[tuple[int, int, int, str]]:
    assert response.status_code == 200, response.text
    given = response.headers["x-raywire-route"].split(", ")
    matches = [ENTRY.fullmatch(each) for each in given]
    return [(int(m[1]), int(m[2]), int(m[3]), m[4]) for m in matches if m]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_response_says_where_the_request_went(server: HttpServer, route: str, stream: bool) -> None:
    """In the headers, of whole answers and of streams; and it is true."""
    before = [len(engine.received) for engine in server.engines]
    text = f"{route}{stream}"
    if route == "chat":
        response = server.chat(text, stream=stream, max_tokens=2)
    else:
        response = server.complete(prompt=text, stream=stream, max_tokens=2)

    [(rank, _, _, rule)] = entries(response)

    after = [len(engine.received) for engine in server.engines]
    assert after[rank] == before[rank] + 1
    assert after[1 - rank] == before[1 - rank]
    assert rule in ("load", "prefix")


def test_same_prompt_goes_to_the_same_rank(server: HttpServer) -> None:
    """The second one finds its blocks there, and the header says how many."""
    prompt = "the same long beginning, once more and again" * 4
    first = entries(server.complete(prompt=prompt, max_tokens=1))

    again = entries(server.complete(prompt=prompt, max_tokens=1))

    assert again == [(first[0][0], 10, 0, "prefix")]


def test_continuations_of_one_prompt_share_a_rank(server: HttpServer) -> None:
    """It is computed once; the prompts of one request are spread, each with an entry."""
    response = server.complete(prompt=[[5] * 8, [6] * 8], n=3, max_tokens=1)

    ranks = [entry[0] for entry in entries(response)]
    assert sorted(ranks) == [0, 1]
    for rank, engine in enumerate(server.engines):
        prompts = [r.prompt_token_ids.tolist() for r in engine.received[-3:]]  # type: ignore[union-attr]
        assert prompts == [[5 + (ranks[1] == rank)] * 8] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_pinned_rank_serves(server: HttpServer, rank: int) -> None:
    """Whatever the load balancer thinks of it."""
    response = server.http.post(
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 1},
        headers={"X-data-parallel-rank": str(rank)},
    )

    assert entries(response)[0][0] == rank
    assert entries(response)[0][3] == "pinned"
    assert server.engines[rank].received[-1].data_parallel_rank == rank


@pytest.mark.parametrize("rank", ["2", "-1", "", "x", "1.0", "٣".encode(), "9" * 1000])
def test_rank_that_does_not_exist_is_refused(server: HttpServer, rank: str | bytes) -> None:
    """With an error that names the header; also where there is one rank."""
    response = server.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x"}]},
        headers={b"X-data-parallel-rank": rank if isinstance(rank, bytes) else rank.encode()},
    )

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "X-data-parallel-rank"
    assert "from 0 to 1" in error["message"]
    assert len(error["message"]) < 200


def test_session_stays_on_its_rank(server: HttpServer) -> None:
    """A name that is too long or strange is no session, and no error."""

    def ask(prompt: str, session: str) -> tuple[int, str]:
        headers = {"X-Session-ID": session}
        body = {"prompt": prompt, "max_tokens": 1}
        response = server.http.post("/v1/completions", json=body, headers=headers)
        rank, _, _, rule = entries(response)[0]
        return rank, rule

    first, _ = ask("s0", "chat-42")
    assert [ask(f"s{i}", "chat-42") for i in range(1, 4)] == [(first, "session")] * 3
    for strange in ("x" * 129, "two words", "<b>"):
        assert ask("t0", strange)[1] == "load"


def test_queue_counts_what_is_in_flight() -> None:
    """Requests that run are seen by the next one, and no longer once they are gone."""
    with serving(endless_answer, num_engines=2, engine_options={"step_s": 0.02}) as server:
        pinned = {"X-data-parallel-rank": "1"}
        body = {"prompt": "x", "stream": True, "max_tokens": 900}
        with server.http.stream("POST", "/v1/completions", json=body, headers=pinned):
            wait_for(lambda: server.engines[1].running)
            busy = server.http.post(
                "/v1/completions", json={"prompt": "y", "max_tokens": 1}, headers=pinned
            )
            assert entries(busy) == [(1, 0, 1, "pinned")]
        wait_for(lambda: not server.client.num_in_flight)
        free = server.http.post(
            "/v1/completions", json={"prompt": "z", "max_tokens": 1}, headers=pinned
        )
        assert entries(free) == [(1, 0, 0, "pinned")]


def test_one_rank_needs_no_header() -> None:
    """Nothing was chosen. Its own number may be asked for, no other."""
    with serving() as server:
        response = server.complete(prompt="x", max_tokens=1)
        assert "x-raywire-route" not in response.headers
        for rank, status in (("0", 200), ("1", 400)):
            headers = {"X-data-parallel-rank": rank}
            body = {"prompt": "x", "max_tokens": 1}
            response = server.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status


def test_ranks_are_counted_over_all_servers() -> None:
    """Where a server has only some of them, clients see and name the same numbers everywhere."""
    with serving(num_engines=2, first_rank=4) as server:
        for rank, status in (("4", 200), ("5", 200), ("1", 400), ("6", 400)):
            response = server.http.post(
                "/v1/completions",
                json={"prompt": "x", "max_tokens": 1},
                headers={"X-data-parallel-rank": rank},
            )
            assert response.status_code == status
            if status == 200:
                assert entries(response)[0][0] == int(rank)
        assert [len(engine.received) for engine in server.engines] == [1, 1]


def test_header_is_bounded() -> None:
    """A request may have a thousand prompts; proxies refuse long headers."""
    routes = [Route(15, 99_999, 9999, "session")] * 1000

    header = route_headers.write(routes, range(16))["X-Raywire-Route"]

    assert header.endswith(", omitted=984")
    assert len(header) < 1000


def test_two_ranks_in_one_request_are_a_mistake() -> None:
    """Neither is more meant than the other."""
    headers = [(b"x-data-parallel-rank", b"0"), (b"x-data-parallel-rank", b"1")]
    with pytest.raises(InvalidRequestError, match="not '0, 1'"):
        route_headers.read(headers, range(2))
