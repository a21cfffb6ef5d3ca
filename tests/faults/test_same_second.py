"""Two servers that start at the same moment on one host."""

import contextlib
import tempfile
from pathlib import Path

import pytest

from tests.helpers.server import Server, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.row("F-45")
def test_two_servers_that_start_in_the_same_second_both_serve() -> None:
    """Ten times, with one temporary folder and one cache, which is empty at first: separate
    ports and sockets, right answers from both, and nothing is left."""
    with (
        tempfile.TemporaryDirectory(prefix="rw-") as shared,
        tempfile.TemporaryDirectory() as cache,
    ):
        env = {"TMPDIR": shared, "RAYWIRE_RPC_BASE_PATH": shared, "RAYWIRE_CACHE_DIR": cache}
        for number in range(10):
            with contextlib.ExitStack() as stack:
                servers = [
                    stack.enter_context(running_server("scripted", env=env, is_ready_awaited=False))
                    for _ in range(2)
                ]
                for server in servers:
                    server.wait_ready(240)
                assert len({server.port for server in servers}) == 2
                for server in servers:
                    assert echo(server, f"round {number}") == f"round {number}"
            assert list(Path(shared).iterdir()) == []


def echo(server: Server, text: str) -> str:
    with server.http() as client:
        body = {"model": "scripted", "prompt": text, "max_tokens": len(text)}
        return str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
