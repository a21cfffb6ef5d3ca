"""TLS on the port: 1.2 and newer, for every API server; files that cannot be used end the start."""

import asyncio
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from api.tls import TlsConfig, make_context
from engine.errors import ConfigError
from tests.helpers.certificates import Certificates, make_certificates
from tests.helpers.http_server import HttpServer, serving
from tests.helpers.server import ROOT, running_server


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def trusting(files: Certificates, *, shows: bool = False) -> ssl.SSLContext:
    """A client's side."""
    context = ssl.create_default_context(cafile=str(files.authority))
    if shows:
        context.load_cert_chain(files.certfile, files.keyfile)
    return context


def ask(server: HttpServer, context: ssl.SSLContext) -> int:
    with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context) as client:
        return client.get("/v1/models").status_code


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_the_port_speaks_tls_and_nothing_older(files: Certificates) -> None:
    """Plain HTTP gets no answer, TLS 1.1 no handshake; streams and probes work as without."""
    tls = TlsConfig(certfile=files.certfile, keyfile=files.keyfile)
    with serving(tls=tls, waits_until_ready=False) as server:
        context = trusting(files)
        with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context) as client:
            while client.get("/ready").status_code != 200:
                pass
            assert client.get("/live").status_code == client.get("/health").status_code == 200
            body = {"prompt": "abc", "stream": True}
            streamed = client.post("/v1/completions", json=body)
            assert streamed.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            server.http.get("/live")
        old = trusting(files)
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            with pytest.raises(ssl.SSLError):
                old.wrap_socket(plain, server_hostname="localhost")


def test_clients_show_certificates_where_they_have_to(files: Certificates) -> None:
    """With --ssl-cert-reqs 2 nobody else gets a word in."""
    tls = TlsConfig(
        certfile=files.certfile, keyfile=files.keyfile, ca_certs=files.authority, cert_reqs=2
    )
    with serving(tls=tls, waits_until_ready=False) as server:
        assert ask(server, trusting(files, shows=True)) in (200, 503)
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            ask(server, trusting(files))


@pytest.mark.parametrize(
    ("cert", "key", "words"),
    [
        ("cert.pem", "encrypted.pem", "is encrypted"),
        ("cert.pem", "none.pem", "cannot be read: No such file"),
        ("key.pem", "key.pem", "cannot be used"),
        ("authority.pem", "key.pem", "cannot be used: key values mismatch"),
        ("cert.pem", None, "cannot be used"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    files: Certificates, cert: str, key: str | None, words: str
) -> None:
    """With what to do, and without waiting for a passphrase that nobody types."""
    folder = files.certfile.parent
    config = TlsConfig(certfile=folder / cert, keyfile=None if key is None else folder / key)

    with pytest.raises(ConfigError, match=words):
        make_context(config)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ssl-keyfile", "KEY"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-cert-reqs", "2"], "--ssl-cert-reqs needs --ssl-certfile"),
        (["--ssl-certfile", "CERT", "--ssl-cert-reqs", "1"], "--ssl-ca-certs says whose"),
        (["--prefix-cache-salt-per-key"], "needs keys"),
        (["--ssl-certfile", "CERT", "--ssl-keyfile", "ENCRYPTED"], "is encrypted"),
    ],
)
def test_a_mistake_ends_the_start_in_one_line(
    files: Certificates, flags: list[str], words: str
) -> None:
    """Exit code 2, before the model is even looked for."""
    names = {"CERT": files.certfile, "KEY": files.keyfile, "ENCRYPTED": files.encrypted_keyfile}
    given = [str(names.get(flag, flag)) for flag in flags]
    ended = subprocess.run(
        [sys.executable, "-m", "cluster", "serve", "/no/such/model", "--port", "0", *given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert words in line


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_api_servers_speak_tls_and_our_commands_too(
    files: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`complete`, `run-batch` and `bench serve` against HTTPS with a key; with a certificate that
    they do not know they say so."""
    key = tmp_path / "keys"
    key.write_text("sk-test\n")
    key.chmod(0o600)
    tls = ("--ssl-certfile", str(files.certfile), "--ssl-keyfile", str(files.keyfile))
    flags = ("--api-server-count", "2", "--api-key-file", str(key), *tls)
    with running_server("scripted", *flags, is_ready_awaited=False) as server:
        server.wait_for_log(r"serving at https://")
        url = f"https://127.0.0.1:{server.port}"
        statuses = asyncio.run(_statuses(url, trusting(files)))
        assert statuses == [200] * 8
        unknown = _command("complete", "--url", url, "-q", "abc")
        assert unknown.returncode != 0
        assert "SSL_CERT_FILE" in unknown.stderr
        monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
        refused = _command("complete", "--url", url, "-q", "abc").stderr
        assert "a key is needed" in refused
        assert "--api-key or OPENAI_API_KEY" in refused
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        assert "abc" in _command("complete", "--url", url, "-q", "abc").stdout
        lines = tmp_path / "in.jsonl"
        lines.write_text(
            '{"custom_id": "1", "method": "POST", "url": "/v1/completions",'
            ' "body": {"prompt": "abc"}}\n'
        )
        output = tmp_path / "out.jsonl"
        sent = _command("run-batch", "-i", str(lines), "-o", str(output), "--url", url)
        assert sent.returncode == 0, sent.stderr
        bench = ("bench", "serve", "--base-url", url, "--num-prompts", "2", "--num-warmups", "0")
        assert _command(*bench, "--output-len", "4").returncode == 0


async def _statuses(url: str, context: ssl.SSLContext) -> list[int]:
    """Of as many connections, which the kernel spreads over the API servers."""
    statuses = []
    for _ in range(8):
        async with httpx.AsyncClient(base_url=url, verify=context) as client:
            answer = await client.get("/v1/models", headers={"x-api-key": "sk-test"})
            statuses.append(answer.status_code)
    return statuses


def _command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
