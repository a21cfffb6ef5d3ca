"""Clients that leave: whatever their request was doing, its blocks are free as soon as the steps
under way have ended, and nothing of it is left in any process."""

import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.scripted_models import make_scripted_model, make_slow_model
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.streams import metric

CHAT = {"messages": [{"role": "user", "content": "x"}]}
LONG = {"max_tokens": 4000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Four sequences at a time, 64 tokens in a step of 20 ms: a long prompt takes seconds."""
    model = make_slow_model(tmp_path_factory.mktemp("models"))
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    with running_server(str(model), "--served-model-name", "m", *flags) as server:
        yield server


@contextmanager
def sent(server: Server, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request whose client leaves at the end of the block, in the middle of whatever it is."""
    raw = json.dumps({"model": "m", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(head.encode() + raw)
        yield client
        # A reset: as from a process that was killed with data unread.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def load(server: Server) -> tuple[float, float]:
    return (
        metric(server, "raywire:num_requests_running"),
        metric(server, "raywire:num_requests_waiting"),
    )


def num_aborted(server: Server) -> float:
    return metric(server, "raywire:request_success_total", finished_reason="abort")


def wait_idle(server: Server) -> None:
    wait_for(lambda: load(server) == (0, 0), "nothing runs or waits")
    assert metric(server, "raywire:kv_cache_usage_perc") == 0


RUNNING = {
    "completion": ("/v1/completions", {"prompt": "x", **LONG}, 1),
    "four choices": ("/v1/completions", {"prompt": "x", "n": 4, **LONG}, 4),
    "the best of four": ("/v1/completions", {"prompt": "x", "best_of": 4, **LONG}, 4),
    "chat": ("/v1/chat/completions", {**CHAT, "n": 2, **LONG}, 2),
    "response": ("/v1/responses", {"input": "x", "max_output_tokens": 4000}, 1),
    "message": ("/v1/messages", {**CHAT, **LONG}, 1),
}


@pytest.mark.row("F-29")
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", RUNNING)
def test_who_leaves_while_it_runs_frees_its_blocks(
    server: Server, kind: str, is_streamed: bool
) -> None:
    """On every route, for every sequence of the request; the aborts are counted."""
    path, body, num_sequences = RUNNING[kind]
    if is_streamed and "best_of" in body:
        pytest.skip("best_of is not streamed")
    before = num_aborted(server)

    with sent(server, path, {**body, "stream": is_streamed}) as client:
        wait_for(lambda: load(server)[0] == num_sequences, "it runs")
        if is_streamed:
            assert client.recv(1 << 12).startswith(b"HTTP/1.1 200 ")

    wait_idle(server)
    assert num_aborted(server) == before + num_sequences


@pytest.mark.row("F-29")
def test_a_search_ends_with_its_client(server: Server) -> None:
    """Beams are requests one after the other; no further step is sent."""
    body = {"prompt": "x", "n": 4, "use_beam_search": True, "max_tokens": 2000}
    before, tokens = num_aborted(server), metric(server, "raywire:generation_tokens_total")
    with sent(server, "/v1/completions", body):
        wait_for(
            lambda: metric(server, "raywire:generation_tokens_total") > tokens,
            "its first step",
        )
    wait_idle(server)
    assert num_aborted(server) == before + 1


@pytest.mark.row("F-29")
def test_who_leaves_while_its_prompt_is_computed_frees_its_blocks(server: Server) -> None:
    """It takes the steps under way and no more: of its 20,000 tokens most are never computed."""
    before = metric(server, "raywire:generation_tokens_total")
    with sent(server, "/v1/completions", {"prompt": "x" * 20_000, "max_tokens": 10}):
        wait_for(lambda: load(server)[0] == 1, "it runs")
        wait_for(lambda: metric(server, "raywire:kv_cache_usage_perc") > 0, "its first chunks")
    wait_idle(server)
    assert metric(server, "raywire:generation_tokens_total") == before


@pytest.mark.row("F-29")
def test_who_leaves_while_it_waits_is_forgotten(server: Server) -> None:
    """It never runs; the one that does is not disturbed."""
    with sent(server, "/v1/completions", {"prompt": "x", "n": 4, **LONG}):
        wait_for(lambda: load(server) == (4, 0), "a full server")
        with sent(server, "/v1/completions", {"prompt": "y", "n": 2, "stream": True, **LONG}):
            wait_for(lambda: load(server) == (4, 2), "two that wait")
        wait_for(lambda: load(server) == (4, 0), "they are forgotten")
    wait_idle(server)


# -------------------------------------------------------------------------------- over a long time


@dataclass(frozen=True)
class Traces:
    """What a process holds."""

    fds: int
    threads: int
    rss: int


def traces(server: Server) -> dict[str, Traces]:
    found = {}
    for title, process in server.raywire_processes().items():
        own = psutil.Process(process.pid)
        found[title] = Traces(own.num_fds(), own.num_threads(), own.memory_info().rss)
    return found


def ask(server: Server, number: int) -> None:
    """One request of several kinds; three of ten clients leave in mid-stream."""
    leaves, path = number % 10 < 3, ["/v1/completions", "/v1/chat/completions"][number % 2]
    body: dict[str, Any] = {
        "stream": True,
        "max_tokens": 400 if leaves else 10,
        "n": 1 + number % 3,
    }
    body |= {"prompt": f"{number} " * 20} if path == "/v1/completions" else CHAT
    with sent(server, path, body) as client:
        text = client.recv(1 << 12)
        assert text.startswith(b"HTTP/1.1 200 ")
        while not leaves and b"[DONE]" not in text[-64:]:
            text = text[-64:] + client.recv(1 << 16)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.row("S-33")
def test_a_thousand_requests_and_three_hundred_disconnects_leave_nothing(tmp_path: Path) -> None:
    """Descriptors, threads and blocks are as before; memory within 5%, and tasks are gone."""
    model = make_scripted_model(tmp_path, kind="cycle", token_ids=list(b"abc"), step_delay_s=0.002)
    with running_server(str(model), "--served-model-name", "m") as server:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda number: ask(server, number), range(300)))  # allocators fill up
            wait_idle(server)
            before, num_before = traces(server), num_aborted(server)
            list(pool.map(lambda number: ask(server, number), range(1000)))
        wait_idle(server)
        wait_for(
            lambda: all(
                (now.fds, now.threads) == (before[title].fds, before[title].threads)
                for title, now in traces(server).items()
            ),
            f"descriptors and threads as before: {before} {traces(server)}",
        )
        for title, now in traces(server).items():
            assert now.rss <= 1.05 * before[title].rss + (2 << 20), title
        assert metric(server, "raywire:api_server_requests_active") == 0
        assert num_aborted(server) - num_before >= 300


@pytest.mark.slow
@pytest.mark.row("F-49")
def test_few_files_are_few_connections(tmp_path: Path) -> None:
    """The start warns of it; one too many gets a 503; and there is room again when some have
    gone."""
    model = make_slow_model(tmp_path)
    with running_server(
        str(model), "--served-model-name", "m", module="tests.helpers.few_files"
    ) as server:
        most = int(server.wait_for_log(r"at most (\d+) connections at a time")[1])
        assert 100 < most < 250
        port, clients = server.port, list[socket.socket]()
        try:
            for _ in range(most):
                clients.append(socket.create_connection(("127.0.0.1", port), timeout=20))
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                answer = client.recv(1 << 12)
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1" in answer
            # Those that are there are served.
            clients[0].sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert clients[0].recv(1 << 12).startswith(b"HTTP/1.1 200 ")
        finally:
            for client in clients:
                client.close()
        server.wait_ready()
        with sent(server, "/v1/completions", {"prompt": "x", "max_tokens": 2}) as client:
            assert client.recv(1 << 12).startswith(b"HTTP/1.1 200 ")
        assert "Traceback" not in server.log
