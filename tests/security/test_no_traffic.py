"""No text of a request is ever an address or a path: a server with hostile clients asks the network
and the file system for nothing."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.audit import Audit
from tests.helpers.server import Server, running_server, wait_for

SECRET = "raywire-test-secret"


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    return Audit(tmp_path_factory.mktemp("audit") / "notes")


@pytest.fixture(scope="module")
def server(audit: Audit) -> Iterator[Server]:
    flags = ("--served-model-name", "m", "--tool-call-parser", "hermes")
    with running_server("scripted", *flags, env=audit.environment) as server:
        assert any("socket" in line or "open" in line for line in audit.lines())
        yield server


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


class Canary:
    """Listens on both kinds of sockets, on every address of this machine; counts who comes."""

    def __init__(self) -> None:
        self.num_visits = 0
        self._tcp = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.port = int(self._tcp.getsockname()[1])
        self._udp.bind(("", self.port))
        for receive in (self._tcp.accept, lambda: self._udp.recvfrom(1)):
            threading.Thread(target=self._count, args=(receive,), daemon=True).start()

    def _count(self, receive: Any) -> None:
        with contextlib.suppress(OSError):
            while True:
                came, _ = receive()
                if isinstance(came, socket.socket):
                    came.close()
                self.num_visits += 1

    def close(self) -> None:
        for each in (self._tcp, self._udp):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def canary() -> Iterator[Canary]:
    with contextlib.closing(Canary()) as canary:
        socket.create_connection(("127.0.0.1", canary.port)).close()
        wait_for(lambda: canary.num_visits == 1, "the canary to notice")
        canary.num_visits = 0
        yield canary


def shapes(port: int) -> list[str]:
    """Thirty ways to write an address that something might fetch."""
    here = f"127.0.0.1:{port}"
    return [
        f"http://{here}/a.png",
        f"HTTP://{here}/",
        f"https://{here}/",
        f"//{here}/a.png",
        f"ftp://{here}/",
        f"ws://{here}/",
        f"gopher://{here}/_x",
        f"ldap://{here}/x",
        f"s3://{here}/bucket",
        f"http://localhost:{port}/",
        f"http://[::1]:{port}/",
        f"http://[::ffff:127.0.0.1]:{port}/",
        f"http://2130706433:{port}/",
        f"http://0x7f000001:{port}/",
        f"http://0177.0.0.1:{port}/",
        f"http://127.1:{port}/",
        f"http://user:pass@{here}/",
        f"http://example.org@{here}/",
        f"http://example.org\\@{here}/",
        f"http://{here}\\@example.org/",
        f"http://{here}#@example.org/",
        f"http://ⓛocalhost:{port}/",
        f"http://127。0。0。1:{port}/",
        f"![an image](http://{here}/a.png)",
        f'<img src="http://{here}/a.png">',
        f'<!DOCTYPE a [<!ENTITY x SYSTEM "http://{here}/">]>&x;',
        f"${{jndi:ldap://{here}/x}}",
        f"{{% include 'http://{here}/' %}}{{{{ x('http://{here}/') }}}}",
        f"<|image|>http://{here}/a.png<|/image|>",
        "file:///etc/hostname",
    ]


def bodies(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that hold an address wherever a text may be, each with its route."""
    user = {"role": "user", "content": url}
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": url}}}
    tool = {"type": "function", "function": {"name": "f", "description": url, "parameters": schema}}
    yield "/v1/completions", {"prompt": url, "max_tokens": 1, "stop": [url], "user": url}
    chat = {"max_tokens": 1, "tools": [tool], "metadata": {"a": url}, "documents": [{"a": url}]}
    parts = {"role": "user", "content": [{"type": "text", "text": url}], "name": url}
    yield "/v1/chat/completions", {"messages": [user, parts], **chat}
    yield "/v1/chat/completions", {"messages": [user], "chat_template_kwargs": {"image": url}}
    block = {"role": "user", "content": [{"type": "text", "text": url}]}
    yield "/v1/messages", {"messages": [block], "system": url, "max_tokens": 1}
    items = {"input": url, "instructions": url, "max_output_tokens": 1, "metadata": {"a": url}}
    yield "/v1/responses", items
    yield "/tokenize", {"prompt": url}


def media(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that ask for something to be fetched."""
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "file", "file": {"file_id": url}},
    ):
        yield "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}
    source = {"type": "image", "source": {"type": "url", "url": url}}
    yield "/v1/messages", {"messages": [{"role": "user", "content": [source]}], "max_tokens": 1}
    image, file = {"type": "input_image", "image_url": url}, {"type": "input_file", "file_url": url}
    for item in (image, file):
        yield "/v1/responses", {"input": [{"role": "user", "content": [item]}]}
    template = {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}
    template["response_format"]["json_schema"]["schema"] = {"$ref": url}  # type: ignore[index]
    yield "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **template}


def asked_for(audit: Audit, num_before: int) -> list[str]:
    """What the API server has opened or connected to since; its run's folder, which is written
    every two seconds, aside."""
    return [line for line in audit.lines()[num_before:] if "/runs/" not in line]


@pytest.mark.row("S-35")
def test_texts_are_never_addresses(http: httpx.Client, audit: Audit, canary: Canary) -> None:
    """Whatever they look like: nobody is connected to, no name is looked up, no file is opened."""
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    num_before = len(audit.lines())

    for url in shapes(canary.port):
        for path, body in bodies(url):
            response = http.post(path, json=body)
            assert response.status_code == 200, (path, url, response.text)

    assert asked_for(audit, num_before) == []
    assert canary.num_visits == 0


@pytest.mark.row("S-34", "S-35")
def test_media_are_refused_and_not_fetched(
    http: httpx.Client, audit: Audit, canary: Canary
) -> None:
    """Each is a 400 that says which part; its address is not even looked at."""
    num_before = len(audit.lines())

    for url in shapes(canary.port):
        for path, body in media(url):
            response = http.post(path, json=body)
            assert response.status_code == 400, (path, url, response.text)
            assert response.json()["error"]["type"] == "invalid_request_error"

    assert asked_for(audit, num_before) == []
    assert canary.num_visits == 0


NAMES = [
    "../../etc/passwd",
    "..",
    ".",
    "/etc/passwd",
    "....//....//etc/passwd",
    "..\\..\\windows",
    "%2e%2e%2fetc%2fpasswd",
    "%252e%252e%252fetc",
    "m/../m",
    "m\0",
    "m\0.safetensors",
    "file:///etc/passwd",
    "~root/.ssh/id_rsa",
    "$HOME/x",
    "`id`",
    "CON",
    "m" * 100_000,
    "é",
    "m ",
    "M",
]


@pytest.mark.row("S-49")
def test_names_are_never_paths(http: httpx.Client, audit: Audit, tmp_path: Path) -> None:
    """Of models and of responses: what is not served is a 404, and nobody has looked for it."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    num_before = len(audit.lines())

    for name in [*NAMES, str(secret), f"../../../../../../../..{secret}"]:
        answers = [
            http.post("/v1/completions", json={"prompt": "x", "model": name}),
            http.post("/v1/chat/completions", json={"messages": [], "model": name}),
            http.post("/v1/responses", json={"input": "x", "previous_response_id": name}),
        ]
        for path in ("/v1/models", "/v1/responses"):
            escaped = "".join(f"%{byte:02X}" for byte in name[:2000].encode())
            answers.append(http.get(f"{path}/{escaped}"))
        for answer in answers:
            assert answer.status_code in (400, 404), (name[:50], answer.text)
            assert SECRET not in answer.text
            assert len(answer.content) < 2000

    assert asked_for(audit, num_before) == []
