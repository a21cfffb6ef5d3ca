"""Web sites: none may speak to the server from a browser unless told so; then on every answer."""

from collections.abc import Iterator

import pytest

from tests.helpers.fake_engine import endless_answer
from tests.helpers.http_server import HttpServer, serving

OURS, THEIRS = {"origin": "https://a.org"}, {"origin": "https://b.org"}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "x-mine"}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving(allowed_origins=("https://a.org",), allowed_methods=("GET", "POST")) as server:
        yield server


def test_without_the_flag_nothing_is_allowed() -> None:
    """No header on any answer; what a browser asks beforehand gets what everybody gets."""
    with serving() as server:
        for method, path in (("GET", "/v1/models"), ("GET", "/nope"), ("OPTIONS", "/v1/models")):
            response = server.http.request(method, path, headers={**OURS, **PREFLIGHT})
            assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/models", 200), ("GET", "/nope", 404), ("PUT", "/v1/completions", 405)],
)
def test_an_allowed_site_reads_answers_and_errors(
    server: HttpServer, method: str, path: str, status: int
) -> None:
    """Without the header a script would not even learn the status."""
    response = server.http.request(method, path, headers=OURS)

    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == "https://a.org"
    exposed = response.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "request-id"} <= set(exposed)
    assert response.headers["vary"] == "Origin"
    assert response.headers["x-request-id"]


def test_bad_requests_and_streams_have_the_header(server: HttpServer) -> None:
    """On both ways past the framework."""
    for body, status in (({"prompt": 7}, 400), ({"prompt": "x", "stream": True}, 200)):
        response = server.http.post("/v1/completions", json=body, headers=OURS)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "https://a.org"


def test_another_site_is_told_nothing(server: HttpServer) -> None:
    """It is answered, as every client is; its browser keeps the answer from it."""
    response = server.http.get("/v1/models", headers=THEIRS)

    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


def test_what_a_browser_asks_beforehand(server: HttpServer) -> None:
    """Yes to the site, its headers and methods; no, in OpenAI's shape, to others."""
    yes = server.http.options("/v1/completions", headers={**OURS, **PREFLIGHT})
    assert yes.status_code == 200
    assert yes.headers["access-control-allow-methods"] == "GET, POST"
    assert yes.headers["access-control-allow-headers"] == "x-mine"
    assert yes.headers["x-request-id"]

    for headers in (THEIRS, {**OURS, "access-control-request-method": "DELETE"}):
        no = server.http.options("/v1/completions", headers={**PREFLIGHT, **headers})
        assert no.status_code == 400
        assert no.json()["error"]["code"] == "cors"
        assert headers["origin"] in no.json()["error"]["message"]


def test_a_server_that_is_loading_can_be_understood() -> None:
    """503 and when to come back, for scripts too; any site, if all are allowed."""
    options = {"is_ready": False}
    with serving(waits_until_ready=False, engine_options=options, allowed_origins=("*",)) as server:
        while (response := server.http.get("/v1/models", headers=OURS)).status_code != 503:
            pass
        assert response.headers["access-control-allow-origin"] == "*"
        assert "retry-after" in response.headers["access-control-expose-headers"]
        assert server.http.options("/v1/models", headers={**OURS, **PREFLIGHT}).status_code == 200


def test_an_error_in_mid_stream_is_an_event_like_any_other() -> None:
    """The header went out with the first byte."""
    with serving(endless_answer, allowed_origins=("*",)) as server:
        with server.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "stream": True}, headers=OURS
        ) as response:
            assert response.headers["access-control-allow-origin"] == "*"
            lines = response.iter_lines()
            next(lines)
            server.engine.die("test")
            assert any('"engine_dead"' in line for line in lines)
