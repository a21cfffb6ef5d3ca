"""How requests are framed: what two parsers might read differently is refused, and the connection
closed, so that nobody's request hides in another one's body."""

import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.http_server import HttpServer, serving

BODY = b'{"prompt":"x"}'
CHUNKED = b"e\r\n" + BODY + b"\r\n0\r\n\r\n"
TE = b"transfer-encoding: chunked"
CL = b"content-length: 14"


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving() as server:
        yield server
        assert server.complete(prompt="ok").status_code == 200


def post(*lines: bytes, body: bytes = BODY, end: bytes = b"\r\n") -> bytes:
    head = [b"POST /v1/completions HTTP/1.1", b"host: x", b"connection: close", *lines]
    return end.join([*head, b"", b""]) + body


REFUSED = {
    "both lengths": post(CL, TE),
    "both lengths, the other way round": post(TE, CL, body=CHUNKED),
    "two lengths": post(CL, b"content-length: 15"),
    "one length twice": post(CL, CL),
    "a list of lengths": post(b"content-length: 14, 14"),
    "a negative length": post(b"content-length: -1"),
    "a length with a sign": post(b"content-length: +14"),
    "a length as Python writes it": post(b"content-length: 1_4"),
    "a length beyond 64 bits": post(b"content-length: 18446744073709551630"),
    "a chunk's size that is none": post(TE, body=CHUNKED.replace(b"e\r\n", b"zz\r\n", 1)),
    "a negative chunk": post(TE, body=b"-" + CHUNKED),
    "a chunk's size in C": post(TE, body=b"0x" + CHUNKED),
    "a chunk longer than it says": post(TE, body=CHUNKED.replace(b"}\r\n", b"}XX")),
    "chunks with bare line feeds": post(TE, body=CHUNKED.replace(b"\r\n", b"\n")),
    "a chunk beyond 64 bits": post(TE, body=b"fffffffffffffffff\r\n"),
    "lines with bare line feeds": post(CL, end=b"\n"),
    "another coding": post(b"transfer-encoding: gzip"),
    "another coding that looks like chunks": post(b"transfer-encoding: xchunked", body=CHUNKED),
    "chunks that are not the last coding": post(b"transfer-encoding: chunked, identity"),
    "a space before a colon": post(b"content-length : 14"),
    "a folded line": post(b"x: a\r\n b", CL),
    "a NUL in a header": post(b"x: a\0b", CL),
    "a path that is no ASCII": b"GET /v1/models/\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    "HTTP/2 at once": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a tunnel": b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a tunnel to a page": b"CONNECT http://a/b HTTP/1.1\r\nhost: x\r\n\r\n",
}


@pytest.mark.row("S-37")
@pytest.mark.parametrize("request_", REFUSED.values(), ids=REFUSED.keys())
def test_what_can_be_read_in_two_ways_is_refused(server: HttpServer, request_: bytes) -> None:
    """One 400, in OpenAI's shape, and the end: whatever follows is read by nobody."""
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(request_ + hidden)
        try:
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        except ConnectionResetError:  # closed while we were still sending
            return

    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"400"]
    assert b'"code":"bad_http"' in answer


OFFER = [b"connection: upgrade", b"upgrade: h2c"]


@pytest.mark.row("S-37")
@pytest.mark.parametrize("framing", [(CL, TE), (TE, CL), (CL, CL), (b"transfer-encoding: gzip",)])
def test_an_offer_of_another_protocol_changes_no_framing(
    server: HttpServer, framing: tuple[bytes, ...]
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(post(*OFFER, *framing))
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))

    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"400"]
    assert b'"code":"bad_http"' in answer


@pytest.mark.row("S-37")
@pytest.mark.parametrize(
    ("framing", "body"), [(CL, BODY), (TE, CHUNKED)], ids=["a length", "chunks"]
)
def test_an_offer_of_another_protocol_may_come_in_pieces(
    server: HttpServer, framing: bytes, body: bytes
) -> None:
    """Cut within its line, or in the end of the head; the body is all there."""
    request = post(*OFFER, framing, body=body)
    line, end = request.index(OFFER[1]), request.index(b"\r\n\r\n")
    for cut in (line, line + 2, line + 7, line + 8, line + 12, line + 13, *range(end, end + 6)):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            send_in_pieces(server, client, request[:cut], request[cut:])
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 200 "), (cut, answer)


LOOKS_LIKE_AN_OFFER = b"upgrade: h2c\r\n"


@pytest.mark.row("S-37")
@pytest.mark.parametrize("num_cut", [1, 2, 3])
def test_a_body_that_looks_like_a_line_of_a_head_is_a_body(
    server: HttpServer, num_cut: int
) -> None:
    """Wherever the head is cut: what were missing in this body would be taken from the request
    behind it."""
    body = LOOKS_LIKE_AN_OFFER + BODY
    head = post(b"content-length: %d" % len(body), body=b"")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        send_in_pieces(server, client, head[:-num_cut], head[-num_cut:] + body)
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"JSON is malformed" in answer


@pytest.mark.row("S-37")
def test_a_value_that_looks_like_a_line_of_a_head_is_a_value(server: HttpServer) -> None:
    """Without it, the next line would be the value, and the body a request of its own."""
    head = post(b"x: " + LOOKS_LIKE_AN_OFFER[:-2], CL)
    cut = head.index(LOOKS_LIKE_AN_OFFER)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        send_in_pieces(server, client, head[:cut], head[cut:])
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")


def send_in_pieces(server: HttpServer, client: socket.socket, *pieces: bytes) -> None:
    """So that the server reads each by itself."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in pieces:
        client.sendall(piece)
        # A later connection has been accepted and answered: what came before has been read.
        with httpx.Client(base_url=server.http.base_url, trust_env=False) as other:
            assert other.get("/live").status_code == 200


@pytest.mark.row("S-37")
@pytest.mark.parametrize("header", [{"range": "bytes=0-1,3-4"}, {"if-none-match": "*"}])
def test_a_part_of_an_answer_is_not_to_be_had(server: HttpServer, header: dict[str, str]) -> None:
    """The whole is sent, as HTTP allows: there is nothing here that is worth a part."""
    response = server.http.get("/v1/models", headers=header)
    assert response.status_code == 200
    assert response.json()["object"] == "list"


@pytest.mark.parametrize("name", ["%00", "..%2f..%2fetc%2fpasswd", "%ff%fe", "x" * 10_000])
def test_a_strange_name_of_a_model_is_just_unknown(server: HttpServer, name: str) -> None:
    """It is compared with the names that are served, and leads to no file."""
    response = server.http.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert len(response.text) < 1000
