"""What every request passes: ids, states of the server, the access log."""

import logging
import re
from collections.abc import Iterator

import pytest

from tests.helpers.http_server import HttpServer, serving, wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving() as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/models", "/nope", "/health"])
def test_request_id_is_repeated(server: HttpServer, path: str) -> None:
    """The client's own, on answers and on errors."""
    response = server.http.get(path, headers={"X-Request-Id": "mine-42"})

    assert response.headers["x-request-id"] == "mine-42"


def test_request_id_is_repeated_on_streams(server: HttpServer) -> None:
    """It is in the headers, before the first event."""
    response = server.http.post(
        "/v1/completions",
        json={"prompt": "x", "stream": True},
        headers={"X-Request-Id": "mine-43"},
    )

    assert response.headers["x-request-id"] == "mine-43"


@pytest.mark.row("S-54")
@pytest.mark.parametrize("bad", [b"x" * 129, b"", b"two words", b'"', b"<b>", "é".encode()])
def test_dangerous_request_id_is_replaced(server: HttpServer, bad: bytes) -> None:
    """Too long, or not of harmless characters; without one, each request gets its own."""
    made = {
        server.http.get("/v1/models", headers={b"X-Request-Id": bad}).headers["x-request-id"]
        for _ in range(2)
    }

    assert len(made) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


def test_head_is_get_without_a_body(server: HttpServer) -> None:
    """On everything that can be read."""
    for path in ("/health", "/ready", "/live", "/v1/models", "/version", "/metrics"):
        response = server.http.head(path)
        assert (response.status_code, response.content) == (200, b"")


def test_probes_and_metrics_are_not_logged(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    """They come for ever; other requests get one line each, with the id that the client knows."""
    caplog.set_level(logging.INFO, "api.edge")
    for path in ("/health", "/ready", "/live", "/metrics"):
        server.http.get(path)
    server.http.get("/v1/models")
    server.http.get("/no\u2028pe")

    wait_for(lambda: len(caplog.records) == 2)

    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith('"GET /v1/models" 200 OK')
    assert second.startswith('"GET /no\\u2028pe" 404 Not Found')


def test_models_are_listed_and_found_by_id(server: HttpServer) -> None:
    """Each served name, with the model's length after fitting."""
    cards = server.http.get("/v1/models").json()["data"]

    assert [card["id"] for card in cards] == ["m", "alias"]
    assert cards[0]["max_model_len"] == 1000
    assert server.http.get("/v1/models/alias").json()["id"] == "alias"
    assert server.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_version_is_ours(server: HttpServer) -> None:
    """As vLLM's route answers."""
    import engine

    assert server.http.get("/version").json() == {"version": engine.__version__}


def test_until_ready_only_live_answers() -> None:
    """503 and when to come back, everywhere else; the first 200 is followed by a success."""
    with serving(waits_until_ready=False, engine_options={"is_ready": False}) as server:
        wait_for(lambda: server.http.get("/live").status_code == 200)
        for path in ("/ready", "/health", "/v1/models", "/version", "/metrics", "/nope"):
            response = server.http.get(path)
            assert (response.status_code, response.headers["retry-after"]) == (503, "2"), path
            assert response.json()["error"]["type"] == "server_error"
        assert server.complete(prompt="x").status_code == 503

        not_ready = server.http.get("/ready").json()
        assert not_ready["status"] == "loading"
        assert not_ready["reason"] == "0 of 1 ranks have loaded the model"
        assert (not_ready["ranks"]["up"], not_ready["ranks"]["all"]) == (0, 1)
        assert not_ready["ranks"]["missing"][0].startswith("DP0: ")

        server.engine.become_ready()
        server.wait_ready()

        assert server.complete(prompt="x").status_code == 200
        assert server.http.get("/health").status_code == 200
        ready = server.http.get("/ready").json()
        assert (ready["status"], ready["reason"], ready["error"]) == ("ready", None, None)
        assert ready["ranks"] == {"up": 1, "all": 1, "missing": []}
