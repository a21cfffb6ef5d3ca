"""Sending a batch, against a server that does what a test has written down."""

import asyncio
import json
import socket
from collections.abc import Sequence

import pytest

from cluster.api_client import ApiClient
from cluster.batch.lines import BadLine, BatchRequest, Line, Result
from cluster.batch.runner import BatchRunner, ServerGoneError
from tests.helpers.canned_http import CannedServer, canned_server


def reply(status: str, body: object, *headers: str) -> list[bytes]:
    """An answer in one piece."""
    content = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers]
    return ["\r\n".join([*lines, "", ""]).encode() + content]


OK = reply("200 OK", {"id": "x"})
BUSY = reply("503 Service Unavailable", {"error": {"message": "loading"}}, "Retry-After: 0")
CUT: list[bytes] = []


def requests(count: int) -> list[Line]:
    return [
        BatchRequest(number, f"r{number}", "/v1/completions", b'{"number": %d}' % number)
        for number in range(count)
    ]


def send(
    server: CannedServer,
    lines: Sequence[Line],
    max_concurrency: int = 1,
    patience_s: float = 30.0,
) -> list[Result]:
    return asyncio.run(send_to(server.port, lines, max_concurrency, patience_s))


async def send_to(
    port: int,
    lines: Sequence[Line],
    max_concurrency: int = 1,
    patience_s: float = 30.0,
    look_s: float = 30.0,
) -> list[Result]:
    results: list[Result] = []
    client = ApiClient(f"http://127.0.0.1:{port}", "key")
    try:
        runner = BatchRunner(client, results.append, patience_s, look_s)
        await runner.run(iter(lines), max_concurrency)
    finally:
        await client.close()
    return results


def test_a_server_that_hangs_is_given_up() -> None:
    """It takes connections, as the kernel does for any process that stands still, and answers
    nothing: neither the requests nor a look."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ServerGoneError, match="no answer to anything"):
            asyncio.run(send_to(port, requests(2), patience_s=0.3, look_s=0.1))


def test_a_long_answer_is_waited_for() -> None:
    """However long, as long as the server answers what needs no model."""

    async def work() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                await asyncio.sleep(1.0)  # five times as long as the patience
            writer.write(OK[0])
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as slow:
            port = slow.sockets[0].getsockname()[1]
            [result] = await send_to(port, requests(1), patience_s=0.2, look_s=0.2)
            assert result.is_success

    asyncio.run(work())


def test_every_line_has_one_result() -> None:
    """Good lines the server's, bad ones an error, and each goes out once."""
    lines = [*requests(2), BadLine(9, None, "invalid_json_line", "no JSON")]
    refused = reply("400 Bad Request", {"error": {"message": "no"}}, "X-Request-ID: abc")
    with canned_server(OK, refused) as server:
        good, bad, broken = send(server, lines)

    assert [json.loads(body) for body in server.bodies] == [{"number": 0}, {"number": 1}]
    assert good.is_success
    assert (good.custom_id, bad.custom_id) == ("r0", "r1")
    assert bad.response is not None
    assert (bad.response.status_code, bad.response.request_id) == (400, "abc")
    assert broken.error is not None
    assert broken.error.line == 9


@pytest.mark.parametrize("max_concurrency", [1, 3])
def test_so_many_are_under_way_at_a_time(max_concurrency: int) -> None:
    """Not fewer, or the engine would be idle; not more."""
    slowly = [OK[0][:-1], b"", b"", b"", OK[0][-1:]]
    with canned_server(*[slowly] * 9) as server:
        results = send(server, requests(9), max_concurrency)

    assert len(results) == 9
    assert server.max_in_flight == max_concurrency


def test_a_busy_server_is_asked_again() -> None:
    """Its refusal is nothing that the request has done."""
    with canned_server(BUSY, BUSY, OK) as server:
        (result,) = send(server, requests(1))

    assert result.is_success
    assert len(server.bodies) == 3


def test_a_connection_that_breaks_is_made_again() -> None:
    """As often as it has to be."""
    with canned_server(CUT, CUT, OK) as server:
        (result,) = send(server, requests(1))

    assert result.is_success
    assert server.num_connections == 3


def test_an_error_of_the_server_is_a_result() -> None:
    """500 is what the server makes of this request; the others go on."""
    internal = reply("500 Internal Server Error", {"error": {"message": "failed"}})
    with canned_server(internal, OK) as server:
        bad, good = send(server, requests(2))

    assert bad.response is not None
    assert bad.response.status_code == 500
    assert good.is_success


def test_a_server_that_is_gone_is_given_up() -> None:
    """The error says what it was last heard to say; what came before is kept."""
    with canned_server(OK, *[BUSY] * 1000) as server:
        with pytest.raises(ServerGoneError, match="no answer within 0 s: HTTP 503: loading"):
            send(server, requests(2), patience_s=0.1)

    assert len(server.bodies) > 2


def test_a_result_that_cannot_be_kept_ends_the_run() -> None:
    """A full disk, say: nothing more is sent."""

    async def run(port: int) -> None:
        client = ApiClient(f"http://127.0.0.1:{port}")

        def refuse(_: Result) -> None:
            raise OSError("disk full")

        try:
            await BatchRunner(client, refuse).run(iter(requests(9)), 2)
        finally:
            await client.close()

    with canned_server(*[OK] * 9) as server:
        with pytest.raises(OSError, match="disk full"):
            asyncio.run(run(server.port))

    assert len(server.bodies) <= 3
