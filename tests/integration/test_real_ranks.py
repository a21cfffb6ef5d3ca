"""A server with a real model over two tensor ranks: what gloo and torch add to the processes."""

import ipaddress
from collections.abc import Iterator

import pytest

from tests.helpers.server import Server, running_server
from tests.helpers.streams import completion_body
from tests.helpers.tiny_models import MAX_LEN, tiny_model

KV_BYTES = 150_000
"""Of each rank: 24 blocks of 16 tokens, at 3 layers x 2 x 16 float32 a token."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model("llama", tmp_path_factory.mktemp("models"))
    flags = ("-tp", "2", "--dtype", "float32", "--served-model-name", "m")
    memory = ("--max-model-len", "auto", "--kv-cache-memory-bytes", str(KV_BYTES))
    with running_server(str(model), *flags, *memory) as server, server.http() as client:
        answer = client.post("/v1/completions", json=completion_body(prompt=[5, 6, 7]))
        assert answer.status_code == 200
        yield server


@pytest.mark.row("F-41")
def test_the_length_is_what_fits(server: Server) -> None:
    """--max-model-len auto: all blocks but the null block, as clients are told."""
    with server.http() as client:
        [card] = client.get("/v1/models").json()["data"]

    assert card["max_model_len"] == 23 * 16 < MAX_LEN


def test_only_http_is_open_to_the_network(server: Server) -> None:
    """The ranks meet over TCP, and listen on loopback."""
    internal = {address for address in server.listeners() if address[1] != server.port}

    assert internal, "gloo listens somewhere, or this test looks at the wrong processes"
    assert all(ipaddress.ip_address(host).is_loopback for host, _ in internal), internal


@pytest.mark.slow
def test_idle_ranks_are_asleep(server: Server) -> None:
    """Threads of torch and gloo included, under 2% of a core over all processes."""
    assert server.cpu_share(seconds=5) < 0.02
