"""Who may break a server, and what of it."""

import signal

import pytest

from api.keys import AccessConfig, Keys, hash_of
from tests.helpers.http_server import serving
from tests.helpers.titled import titled_process

ACCESS = AccessConfig(
    api=Keys(hashes=(hash_of(b"api-key"),)), admin=Keys(hashes=(hash_of(b"admin-key"),))
)
ADMIN = {"authorization": "Bearer admin-key"}
KILL = {"kind": "kill-rank", "draw": 0.6}


@pytest.mark.row("S-40", "S-50")
def test_without_an_administrators_key_nobody_can_break_anything() -> None:
    """There is no such route; with one, no other key opens it."""
    with serving() as server:
        assert server.http.get("/chaos").status_code == 404
        assert server.http.post("/chaos", json=KILL).status_code == 404
    with serving(access=ACCESS) as server, titled_process("RAYWIRE::EngineCore_DP0") as rank:
        for headers in ({}, {"authorization": "Bearer api-key"}):
            assert server.http.get("/chaos", headers=headers).status_code == 401
            assert server.http.post("/chaos", json=KILL, headers=headers).status_code == 401
        web_site = {**ADMIN, "origin": "https://evil.org"}
        assert server.http.post("/chaos", json=KILL, headers=web_site).status_code == 403
        assert rank.poll() is None


def test_an_administrator_kills_one_process_of_the_server() -> None:
    """The one that was drawn, and it is told which. Nobody else is touched, and what is asked for
    is checked first."""
    with (
        serving(access=ACCESS) as server,
        titled_process("RAYWIRE::EngineCore_DP0") as first,
        titled_process("RAYWIRE::EngineCore_DP1") as second,
        titled_process("someone else") as stranger,
    ):
        shown = server.http.get("/chaos", headers=ADMIN).json()
        assert [each["title"] for each in shown["processes"]] == [
            *("EngineCore_DP0", "EngineCore_DP1")
        ]
        for body in ({"kind": "kill-all"}, {"kind": "kill-rank", "draw": 1.0}, {"pid": 1}):
            assert server.http.post("/chaos", json=body, headers=ADMIN).status_code == 400
        nobody = server.http.post("/chaos", json={"kind": "kill-worker"}, headers=ADMIN)
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (409, "no_target")
        assert "no worker of this server" in nobody.json()["error"]["message"]

        told = server.http.post("/chaos", json=KILL, headers=ADMIN).json()

        assert told == {"title": "EngineCore_DP1", "role": "rank", "pid": second.pid}
        assert second.wait(5) == -signal.SIGKILL
        assert first.poll() is None
        assert stranger.poll() is None
