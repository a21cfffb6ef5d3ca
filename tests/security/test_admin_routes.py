"""Administrators' routes: not there without their key; with one, only for who has it, and for no
web site."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from api.guard import is_own_name
from api.keys import AccessConfig, Keys, hash_of
from tests.helpers.fake_engine import endless_answer
from tests.helpers.http_server import HttpServer, serving
from tests.helpers.server import wait_for

ROUTES = ("/reset_prefix_cache", "/start_profile", "/stop_profile")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ADMIN = {"authorization": "Bearer admin-key"}
ACCESS = AccessConfig(
    api=Keys(hashes=(hash_of(b"api-key"),)), admin=Keys(hashes=(hash_of(b"admin-key"),))
)


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving(access=ACCESS, profile_dir="/p", allowed_origins=("https://ours.org",)) as server:
        yield server


@pytest.mark.row("S-50", "S-40")
def test_without_an_administrators_key_they_do_not_exist() -> None:
    """Not even to be refused: with every method they are paths like any other."""
    with serving(profile_dir="/p") as server:
        for path in ROUTES:
            statuses = {server.http.request(each, path).status_code for each in METHODS}
            assert statuses == {404}, path


@pytest.mark.row("S-40", "S-50")
@pytest.mark.parametrize("path", ROUTES)
def test_no_other_key_opens_them(server: HttpServer, path: str) -> None:
    """With every method."""
    for headers in ({}, {"authorization": "Bearer api-key"}, {"x-api-key": "admin-ke"}):
        for method in METHODS:
            status = server.http.request(method, path, headers=headers).status_code
            # One of the API's keys may learn that POST is the method, as of any route.
            has_key = headers.get("authorization") is not None
            expected = 401 if method == "POST" or not has_key else 405
            assert status == (204 if (method, has_key) == ("OPTIONS", True) else expected)


@pytest.mark.row("S-40")
def test_the_key_opens_them_for_their_method(server: HttpServer) -> None:
    """And opens nothing else: it is no key of the API."""
    for path in ROUTES:
        assert server.http.post(path, headers=ADMIN).status_code == 200
        assert server.http.delete(path, headers=ADMIN).status_code == 401
    assert server.http.get("/v1/models", headers=ADMIN).status_code == 401


@pytest.mark.row("S-40", "S-39")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.org"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "https://ours.org", "sec-fetch-site": "cross-site"}, 200),
        ({"host": "evil.org"}, 403),
        ({"host": "evil.org:8000", "origin": "http://evil.org:8000"}, 403),
        ({"host": "localhost"}, 200),
        ({"host": "raywire.models.svc.cluster.local:8000"}, 200),
    ],
)
def test_a_web_site_cannot_use_a_browser_that_has_the_key(
    server: HttpServer, headers: dict[str, str], status: int
) -> None:
    """Neither by asking across origins nor by pointing its own name at us (DNS rebinding)."""
    response = server.http.post("/reset_prefix_cache", headers={**ADMIN, **headers})

    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "forbidden"


def test_names_that_nobody_can_point_at_us() -> None:
    """Addresses, names without a dot, and reserved ends."""
    own = "127.0.0.1 127.0.0.1:80 [::1] [::1]:80 10.1.2.3:8000 localhost raywire a.svc:1 x.local."
    assert [name for name in own.split() if not is_own_name(name)] == []
    others = (
        "",
        "evil.org",
        "evil.org:80",
        "127.0.0.1.evil.org",
        "a.svc.evil.org",
        "evil.org:",
        ".",
    )
    assert [name for name in others if is_own_name(name)] == []


def test_a_profile_is_written_down_by_those_that_are_left() -> None:
    """A rank that has taken another's place meanwhile knows of none, and the answer says so."""
    access = AccessConfig(admin=ACCESS.admin)
    with serving(num_engines=2, access=access, profile_dir="/p") as server:

        def ask(path: str) -> httpx.Response:
            return server.http.post(path, headers=ADMIN)

        assert ask("/start_profile").status_code == 200
        server.engines[1].is_profiling = False
        answer = ask("/stop_profile")
        assert answer.status_code == 200
        assert answer.json() == {"recorded": [0], "not_recorded": [1]}
        assert not server.engine.is_profiling
        assert ask("/stop_profile").status_code == 409


def test_a_rank_that_is_lost_while_it_writes_its_profile_is_named() -> None:
    """The others have written theirs, and nobody can ask them for it again."""
    access = AccessConfig(admin=ACCESS.admin)
    with serving(num_engines=2, access=access, profile_dir="/p") as server:
        assert server.http.post("/start_profile", headers=ADMIN).status_code == 200
        server.engines[1].answers_calls = False
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.http.post, "/stop_profile", headers=ADMIN)
            wait_for(lambda: len(server.engines[1].calls) == 2, "it is asked")
            wait_for(lambda: not server.engine.is_profiling, "the other one writes")
            server.client.lose(1, 0, "killed")
            answer = asked.result()

        assert answer.status_code == 200
        assert answer.json() == {"recorded": [0], "not_recorded": [1]}


def test_a_reset_says_whether_it_was_one(server: HttpServer) -> None:
    """As vLLM's does: running requests keep their blocks, and the client may ask again."""

    def ask(server: HttpServer) -> object:
        return server.http.post("/reset_prefix_cache", headers=ADMIN).json()

    assert ask(server) == {"success": True}
    body = {"prompt": "x", "stream": True, "max_tokens": 900}
    slow = {"step_s": 0.05}
    with serving(
        endless_answer, access=AccessConfig(admin=ACCESS.admin), engine_options=slow
    ) as busy:
        with busy.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines)  # by now the engine has it
            assert ask(busy) == {"success": False}
        busy.wait_idle()
