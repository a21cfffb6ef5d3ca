"""What holds on every route: methods, paths, pages, routes of other kinds of models."""

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import engine
from api.errors import is_anthropic
from tests.helpers.fake_engine import endless_answer
from tests.helpers.http_server import HttpServer, events, serving, wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving(root_path="/llm") as server:
        yield server


def operations(server: HttpServer) -> Iterator[tuple[str, str]]:
    """Method and path of each route, with something put in for parameters."""
    for path, methods in server.http.get("/openapi.json").json()["paths"].items():
        for method in methods:
            yield method.upper(), re.sub(r"\{\w+\}", "m", path)


def test_every_path_has_options(server: HttpServer) -> None:
    """They name the methods there are, HEAD wherever there is GET."""
    for method, path in operations(server):
        response = server.http.options(path)
        listed = response.headers["allow"].split(", ")
        allowed = set(listed)
        assert (response.status_code, response.content) == (204, b""), path
        assert len(listed) == len(allowed), path
        assert {method, "OPTIONS"} <= allowed
        assert ("HEAD" in allowed) == ("GET" in allowed)


def test_a_path_has_the_methods_of_its_own_routes(server: HttpServer) -> None:
    """All of them; where a name could be a parameter of another route, not those of that one."""
    one = server.http.options("/v1/responses/resp_1").headers["allow"]
    render = server.http.options("/v1/responses/render").headers["allow"]
    assert one == "DELETE, GET, HEAD, OPTIONS"
    assert render == "OPTIONS, POST"


def test_every_get_has_head(server: HttpServer) -> None:
    """The same status and headers, and no body."""
    for method, path in operations(server):
        if method == "GET" and path != "/metrics":  # whose length changes
            full, head = server.http.get(path), server.http.head(path)
            assert (head.status_code, head.content) == (full.status_code, b""), path
            names = ("content-type", "content-length")
            assert [head.headers.get(n) for n in names] == [full.headers.get(n) for n in names]


def test_other_methods_are_a_405_that_says_which_there_are(server: HttpServer) -> None:
    """On every path, in the shape of its API."""
    for path in {path for _, path in operations(server)}:
        allowed = set(server.http.options(path).headers["allow"].split(", "))
        others = {"GET", "POST", "DELETE"} - allowed
        if path in ("/v1/responses/render", "/v1/responses/input_tokens"):
            others -= {"GET", "DELETE"}  # which ask for a response of that name
        for method in ("PUT", "PATCH", "PROPFIND", *others):
            response = server.http.request(method, path)
            assert response.status_code == 405, (method, path)
            assert set(response.headers["allow"].split(", ")) == allowed
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert is_anthropic(path) or error["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/models", "/v1/Models", "/v1/chat", "/%2e%2e/x"])
def test_what_is_no_route_is_a_404(server: HttpServer, path: str) -> None:
    """Whatever the method; OPTIONS too."""
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        response = server.http.request(method, path)
        assert response.status_code == 404, (method, path)
        assert response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    "path", ["/v1/completions/", "/llm/v1/completions", "/llm/v1/completions/"]
)
def test_a_path_is_known_by_its_variants(server: HttpServer, path: str) -> None:
    """With a slash at its end, and with the proxy's prefix: answered, not redirected, since the
    place that a redirect would name may be unknown to whoever is behind a proxy."""
    response = server.http.post(path, json={"prompt": "abc"})

    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == "abc"


def test_only_the_whole_prefix_is_one(server: HttpServer) -> None:
    """And it is one once."""
    for path in ("/llmv1/models", "/llm/llm/v1/models", "/LLM/v1/models"):
        assert server.http.get(path).status_code == 404
    assert server.http.get("/llm/health").status_code == 200
    assert server.http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    ],
)
def test_routes_of_other_models_say_why_they_are_not_served(server: HttpServer, path: str) -> None:
    """404, as vLLM answers for a model that cannot do it; whatever the body."""
    for body in (b'{"model": "m", "input": "x"}', b"", b"--boundary"):
        response = server.http.post(path, content=body)
        error = response.json()["error"]
        assert response.status_code == 404
        assert (error["code"], error["param"]) == ("unsupported_model", "model")
        assert error["message"].startswith("m generates text and ")


def test_models_have_the_fields_of_vllm(server: HttpServer) -> None:
    """Clients read lengths and permissions there."""
    for card in server.http.get("/v1/models").json()["data"]:
        assert card.keys() == {
            "id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission",
        }  # fmt: skip
        (permission,) = card["permission"]
        assert permission["object"] == "model_permission"
        assert permission["allow_sampling"]
        assert server.http.get(f"/v1/models/{card['id']}").json() == card


def test_server_info_is_in_vllm_s_shape(server: HttpServer) -> None:
    """As text or as an object; anything else is named."""
    text = server.http.get("/server_info").json()
    info = server.http.get("/server_info?config_format=json").json()

    assert text.keys() == info.keys() == {"vllm_config", "vllm_env", "system_env"}
    assert "model: {" in text["vllm_config"]
    assert info["vllm_config"]["model"]["max_model_len"] == 1000
    assert info["vllm_config"]["engines"][0]["state"] == "up"
    assert info["system_env"]["raywire_version"] == engine.__version__
    wrong = server.http.get("/server_info?config_format=xml")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "config_format")


def test_server_info_tells_no_secret(server: HttpServer) -> None:
    """Neither paths, nor addresses, nor the environment."""
    shown = server.http.get("/server_info?config_format=json").text
    assert not re.search(r"/tmp|/home|/usr|\.sock|ipc:|tcp:|127\.0|PATH|0x", shown)


def test_load_is_what_is_in_work() -> None:
    """Requests being answered; asking for it is none."""
    with serving(endless_answer) as server:
        assert server.http.get("/load").json() == {"server_load": 0}
        body = {"prompt": "x", "stream": True, "max_tokens": 900}
        server.engine.step_s = 0.05  # it takes longer than the test
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # held: without it the stream would be closed
            next(lines)
            assert server.http.get("/load").json() == {"server_load": 1}
        wait_for(lambda: server.http.get("/load").json() == {"server_load": 0})


def test_ping_is_health(server: HttpServer) -> None:
    """For hosts that ask so, by GET or by POST."""
    assert server.http.get("/ping").status_code == 200
    assert server.http.post("/ping").status_code == 200


def test_invocations_are_answered_by_what_they_hold(server: HttpServer) -> None:
    """Chats and completions, whole and streamed; errors are those of the route that answers."""
    messages = [{"role": "user", "content": "abc"}]
    for fields, kind in (({"messages": messages}, "chat.completion"), ({"prompt": "abc"}, None)):
        whole = server.http.post("/invocations", json=fields).json()
        assert whole["object"] == (kind or "text_completion")
        streamed = server.http.post("/invocations", json={**fields, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        wrong = server.http.post("/invocations", json={**fields, "top_p": 2})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "top_p")
    for body in (b"", b"[]", b"{", b"{}", b"[" * 10_000, b'{"input": "x"}'):
        wrong = server.http.post("/invocations", content=body)
        assert wrong.status_code == 400, body[:10]
    assert wrong.json()["error"]["param"] == "messages"


def test_pages_need_nothing_from_elsewhere(server: HttpServer) -> None:
    """A cluster may reach nothing outside: all addresses are of this server, below any prefix."""
    for path in ("/docs", "/redoc", "/llm/docs"):
        response = server.http.get(path)
        assert response.headers["content-type"].startswith("text/html")
        assert "//" not in re.sub(r"^//.*$|\s//.*$", "", response.text, flags=re.MULTILINE)
        assert not re.search(r"""(src|href)=""", response.text)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "'sha256-" in policy


def test_docs_can_be_switched_off() -> None:
    """Then there is nothing, as with vLLM's flag."""
    with serving(has_docs=False) as server:
        for path in ("/openapi.json", "/docs", "/redoc"):
            assert server.http.get(path).status_code == 404


def exchange(server: HttpServer, *pieces: bytes) -> bytes:
    """All that comes back for these bytes, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        for piece in pieces:
            client.sendall(piece)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def post(body: bytes, *lines: str) -> bytes:
    head = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


def test_a_client_may_ask_before_it_sends_a_body(server: HttpServer) -> None:
    """`Expect: 100-continue`: told to go on, and answered; curl does so with long bodies."""
    body = b'{"prompt": "abc"}'
    whole = post(body, "expect: 100-continue", "connection: close")
    answer = exchange(server, whole[: -len(body)], body)

    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert b'"text":"abc"' in answer


def test_requests_in_a_row_are_answered_in_that_order(server: HttpServer) -> None:
    """Pipelined: all sent before the first answer, good and bad ones, whole and streamed."""
    bodies = [b'{"prompt": "1"}', b'{"prompt": 1}', b'{"prompt": "2", "stream": true}']
    last = post(b'{"prompt": "3"}', "connection: close")
    answer = exchange(server, b"".join(post(body) for body in bodies) + last)

    statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
    assert statuses == [b"200", b"400", b"200", b"200"]
    places = [answer.index(b'"text":"%d"' % number) for number in (1, 2, 3)]
    assert places == sorted(places)


def test_a_body_that_nobody_reads_does_not_confuse_the_next_request(server: HttpServer) -> None:
    """Routes that answer without looking leave the connection usable."""
    unread = post(b'{"prompt": "x"}').replace(b"/v1/completions", b"/v1/embeddings ".strip())
    last = post(b'{"prompt": "y"}', "connection: close")
    answer = exchange(server, unread + last)

    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"404", b"200"]


def test_streams_end_once(server: HttpServer) -> None:
    """The way to the routes leaves streams as they are."""
    fields: dict[str, Any] = {"prompt": "abc", "stream": True}
    response = server.http.post("/llm/v1/completions", json=fields)
    assert "".join(each["choices"][0]["text"] for each in events(response)) == "abc"
    assert response.text.endswith("data: [DONE]\n\n")
