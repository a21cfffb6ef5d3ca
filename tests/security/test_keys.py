"""With a key set, every route needs it but the probes: whatever the method, however the path is
spelt."""

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from api import keys as keys_module
from api.app import all_routes
from api.config import ApiConfig
from api.engine_client import EngineClient
from api.keys import AccessConfig, KeyRing, Keys, hash_of, hashes_of, read_file
from api.routing import Route
from api.service import Service
from engine.errors import ConfigError
from tests.helpers.http_server import HttpServer, serving, wait_for

KEY, OTHER = "sk-one-0123456789", "sk-two-0123456789"
PROBES = {"/live", "/ready", "/health", "/ping"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


def keys_of(*texts: str) -> Keys:
    return Keys(hashes=tuple(hash_of(text.encode()) for text in texts))


ACCESS = AccessConfig(api=keys_of(KEY, OTHER), admin=keys_of("sk-admin"))
CONFIG: dict[str, Any] = {"access": ACCESS, "profile_dir": "/p"}


def bearer(key: str) -> dict[str, str]:
    """No header at all for no key."""
    return {"authorization": f"Bearer {key}"} if key else {}


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serving(**CONFIG, allowed_origins=("https://ours.org",)) as server:
        yield server


def table() -> list[Route]:
    """All routes that there may be."""
    service = Service(ApiConfig(served_model_names=("m",), **CONFIG), EngineClient(1))
    try:
        return all_routes(service)
    finally:
        service.close()


def raw_status(server: HttpServer, method: str, target: str) -> int:
    """What the server says to just this request line, without a key."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        head = f"{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
        connection.sendall(f"{head}connection: close\r\n\r\n{{}}".encode())
        answer = connection.makefile("rb").readline()
    return int(answer.split()[1])


def spellings(path: str) -> list[str]:
    """Ways to write a path, of which some lead to its route and others nowhere."""
    name = path.lstrip("/")
    escaped = "".join(f"%{ord(c):02x}" if c.isalpha() else c for c in path)
    return [
        *(path, f"{path}/", f"{path}//", f"//{name}", f"/./{name}", f"/x/../{name}", escaped),
        *(
            path.replace("/", "%2f"),
            "/" + name.replace("/", "%2F"),
            path.upper(),
            f"{path}?a=/live",
        ),
        *(f"{path};/live", f"{path}%00", f"/live/..{path}", f"/live/%2e%2e{path}", f"{path}#/live"),
    ]


@pytest.mark.row("S-42", "S-40")
def test_no_route_answers_without_a_key(server: HttpServer) -> None:
    """The whole table, every method, with no key and with a wrong one. Nothing reaches the
    engine."""
    paths = {re.sub(r"{[^}]*}", "x", route.path) for route in table()} - PROBES
    assert len(paths) > 35  # they are all there, the administrator's too
    num_received = len(server.engine.received)
    for path in sorted(paths):
        for method in METHODS:
            for headers in ({}, bearer("wrong")):
                response = server.http.request(method, path, headers=headers, content=b"{}")
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"].startswith('Bearer realm="raywire"')
    assert len(server.engine.received) == num_received


@pytest.mark.row("S-42")
def test_no_spelling_of_a_path_leads_round_the_key(server: HttpServer) -> None:
    """Slashes, dots, percent signs: what finds a route finds its guard. A probe's name in the path
    is not a probe."""
    num_received = len(server.engine.received)
    for path in ("/v1/models", "/v1/chat/completions", "/metrics", "/v1/messages", "/nope"):
        for spelling in spellings(path):
            for method in ("GET", "POST", "OPTIONS"):
                # Not httpx's own request, which would tidy the path.
                status = raw_status(server, method, spelling)
                assert status in (401, 400), (method, spelling)
    assert len(server.engine.received) == num_received


@pytest.mark.row("S-42")
def test_probes_need_no_key(server: HttpServer) -> None:
    """They come from machines that have none."""
    for path in PROBES:
        assert server.http.get(path).status_code == 200


@pytest.mark.row("S-42")
def test_a_new_route_is_covered() -> None:
    """By default: who adds one has to say otherwise."""
    open_paths = {route.path for route in table() if route.access == "open"}

    assert Route(("GET",), "/new", None).access == "key"  # type: ignore[arg-type]
    assert open_paths == PROBES


@pytest.mark.row("S-42")
@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        bearer(OTHER),
        {"authorization": f"bearer  {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "authorization": "Bearer none"},
    ],
)
def test_any_key_opens_every_kind_of_route(server: HttpServer, headers: dict[str, str]) -> None:
    """In OpenAI's header or in Anthropic's, past the framework and through it."""
    ask = server.http
    message = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    assert ask.get("/v1/models", headers=headers).status_code == 200
    assert ask.get("/metrics", headers=headers).status_code == 200
    assert ask.get("/nope", headers=headers).status_code == 404
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert ask.post(path, headers=headers, json=message).status_code == 200


@pytest.mark.row("S-42", "S-43")
@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer"},
        {"x-api-key": ""},
        bearer(KEY[:-1]),
        bearer(f"{KEY}x"),
        bearer(KEY.upper()),
        bearer(f"{KEY},{OTHER}"),
        bearer("sk-admin"),
        bearer("x" * 60_000),
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer\t{KEY}"},
        {"api-key": KEY},
        {"x-api-key": f"Bearer {KEY}"},
        {"cookie": f"authorization=Bearer {KEY}"},
    ],
)
def test_nothing_else_opens_one(server: HttpServer, headers: dict[str, str]) -> None:
    """Part of a key, more than one, another kind of header, an administrator's."""
    assert server.http.get("/v1/models", headers=headers).status_code == 401
    assert server.http.get(f"/v1/models?api_key={KEY}", headers=headers).status_code == 401


@pytest.mark.row("S-42")
def test_refusals_have_the_shape_of_their_api(server: HttpServer) -> None:
    """Clients' libraries raise their error of authentication; none has the key in it."""
    openai = server.http.post("/v1/completions", headers=bearer("wrong-key"))
    anthropic = server.http.post("/v1/messages", headers={"x-api-key": "wrong-key"})

    assert openai.json()["error"]["code"] == "invalid_api_key"
    assert openai.json()["error"]["type"] == "invalid_request_error"
    assert anthropic.json()["error"]["type"] == "authentication_error"
    assert openai.headers["www-authenticate"].endswith('error="invalid_token"')
    assert "wrong-key" not in openai.text + anthropic.text


@pytest.mark.row("S-42")
def test_a_browsers_question_beforehand_needs_no_key(server: HttpServer) -> None:
    """CORS: it never has one. The request after it does, and its script may read the 401."""
    site = {"origin": "https://ours.org"}
    asked = {**site, "access-control-request-method": "POST"}

    assert server.http.options("/v1/completions", headers=asked).status_code == 200
    refused = server.http.post("/v1/completions", headers=site)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://ours.org"


def test_refusals_are_counted(server: HttpServer) -> None:
    """In the metrics, since somebody who tries keys is worth an alarm."""
    assert server.http.get("/v1/models").status_code == 401
    shown = server.http.get("/metrics", headers=bearer(KEY)).text
    [count] = re.findall(r"^raywire:unauthorized_requests (\S+)$", shown, re.MULTILINE)
    assert float(count) >= 1


@pytest.mark.row("S-42")
@pytest.mark.parametrize(
    ("access", "statuses"),
    [
        ({}, {"": 200}),
        ({"api": keys_of(KEY)}, {"": 401, "m": 401, KEY: 200}),
        ({"api": keys_of(KEY), "metrics": keys_of("m")}, {"": 401, "m": 200, KEY: 200}),
        ({"metrics": keys_of("m")}, {"": 401, "m": 200}),
        ({"api": keys_of(KEY), "has_open_metrics": True}, {"": 200}),
    ],
)
def test_metrics_have_a_switch_of_their_own(
    access: dict[str, Any], statuses: dict[str, int]
) -> None:
    """Open without keys; with some, for those or for a key that opens nothing else."""
    with serving(access=AccessConfig(**access)) as server:
        for key, status in statuses.items():
            assert server.http.get("/metrics", headers=bearer(key)).status_code == status
        if "api" in access:
            assert server.http.get("/v1/models", headers=bearer("m")).status_code == 401


# ----------------------------------------------------------------------------------- comparing


@pytest.mark.row("S-43")
def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of one length, each of them, also behind one that fits."""
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("api.keys.hmac.compare_digest", compare)
    ring = KeyRing(keys_of("a", "b" * 100, "c"))
    for offered in (b"a", b"c", b"", b"x" * 500):
        compared.clear()
        ring.find(offered)
        assert compared == [(32, 32)] * 3
    source = Path(keys_module.__file__).read_text(encoding="utf-8")
    assert " in self._known" in source
    assert not re.search(r"hashed? ==|== hashed?", source)


@pytest.mark.row("S-43")
def test_time_does_not_tell_how_much_of_a_key_is_right() -> None:
    """1,000 wrong keys with none and with all but one of its characters right: the medians are
    closer than the halves of either."""
    ring = KeyRing(keys_of(KEY))
    none, most = b"#" * len(KEY), KEY[:-1].encode() + b"#"
    times: dict[bytes, list[int]] = {none: [], most: []}
    for _ in range(1000):
        for offered, taken in times.items():
            began = time.perf_counter_ns()
            ring.find(offered)
            taken.append(time.perf_counter_ns() - began)
    spread = max(sorted(taken)[750] - sorted(taken)[250] for taken in times.values())
    assert abs(median(times[none]) - median(times[most])) <= max(spread, 100)


def test_settings_show_no_key() -> None:
    """Not even their hashes."""
    shown = repr(ApiConfig(served_model_names=("m",), access=ACCESS))
    assert KEY not in shown
    assert hash_of(KEY.encode()).hex() not in shown
    assert repr(hash_of(KEY.encode())) not in shown


# --------------------------------------------------------------------------------- files of keys


def test_a_file_of_keys_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """Keys come and go without a restart."""
    file, replacement = tmp_path / "keys", tmp_path / "new"
    file.write_text(f"# ours\n{KEY}\n\n")
    with serving(access=AccessConfig(api=Keys(file=file))) as server:

        def status(key: str) -> int:
            return server.http.get("/v1/models", headers=bearer(key)).status_code

        assert (status(KEY), status(OTHER), status("#")) == (200, 401, 401)
        replacement.write_text(f"{OTHER}\n")
        replacement.replace(file)
        wait_for(lambda: status(OTHER) == 200, "the new key")
        assert status(KEY) == 401


def test_what_is_no_file_of_keys_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be half written, or gone for a moment; that is said once. An empty one is clear:
    nobody is left but those of the command line."""
    monkeypatch.setattr(keys_module, "_LOOK_EVERY_S", 0.0)
    file = tmp_path / "keys"
    file.write_text(KEY)
    ring = KeyRing(Keys(hashes=(hash_of(b"given"),), file=file))

    def has(key: str) -> bool:
        return ring.find(key.encode()) is not None

    file.write_bytes(b"\xff\xfe is no text")
    assert [has(KEY), has(KEY), has(OTHER)] == [True, True, False]
    file.unlink()
    assert [has(KEY), has(KEY)] == [True, True]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    file.write_text(OTHER)
    assert [has(KEY), has(OTHER), has("given")] == [False, True, True]
    file.write_text("")
    assert [has(KEY), has(OTHER), has("given")] == [False, False, True]
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "content", [b"", b"# only\n", b"two words\n", "schl\u00fcssel\n".encode(), b"\xff"]
)
def test_a_file_without_a_key_ends_the_start(tmp_path: Path, content: bytes) -> None:
    """In one line that names the file and shows nothing of it."""
    file = tmp_path / "keys"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=str(file)) as caught:
        hashes_of(read_file(file), str(file))
    assert "two words" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / "none")
