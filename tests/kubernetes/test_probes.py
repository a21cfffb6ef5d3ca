"""The very commands of the probes, run by bash: Ray well or not, a server there or not, in each of
its states."""

import http.server
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.kubernetes import probes
from tests.helpers.certificates import make_certificates

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl; the image has it")


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers each path with its status."""

    def do_GET(self) -> None:
        self.send_response(self.server.statuses.get(self.path, 404))  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """No noise."""


@contextmanager
def answering(tls: ssl.SSLContext | None = None, **statuses: int) -> Iterator[int]:
    """A server that answers `/name` with the status; its port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.statuses = {  # type: ignore[attr-defined]
        "/" + name.replace("_", "/"): status for name, status in statuses.items()
    }
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def nobody() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def passes(command: str, agent_port: int) -> bool:
    """Whether the kubelet would be content."""
    here = command.replace(f":{probes.AGENT_PORT}/", f":{agent_port}/")
    assert " -m 4 " in here
    here = here.replace(" -m 4 ", " -m 1 ")  # seconds to wait for an answer
    done = subprocess.run(["bash", "-c", here], capture_output=True, timeout=30, check=False)
    return done.returncode == 0


def test_before_the_server_is_there_ray_answers() -> None:
    """Else the operator would wait for the pod, and the server for the operator."""
    with answering(api_healthz=200) as agent:
        port = nobody()
        assert passes(probes.ray_is_up(), agent)
        assert passes(probes.can_take_requests(port), agent)
        assert passes(probes.needs_no_restart(port), agent)


@pytest.mark.parametrize(
    ("ready", "live", "takes_requests", "needs_no_restart"),
    [(200, 200, True, True), (503, 200, False, True), (503, 503, False, False)],
    ids=["serving", "loading, draining or shedding", "dead or hung"],
)
def test_a_server_that_is_there_answers_for_itself(
    ready: int, live: int, takes_requests: bool, needs_no_restart: bool
) -> None:
    """A restart only where restart is the remedy; no traffic for who cannot take it."""
    with answering(api_healthz=200) as agent, answering(ready=ready, live=live) as port:
        assert passes(probes.can_take_requests(port), agent) is takes_requests
        assert passes(probes.needs_no_restart(port), agent) is needs_no_restart


@pytest.mark.parametrize("health", [None, 503])
def test_without_ray_nothing_is_well(health: int | None) -> None:
    with answering(ready=200, live=200) as port, answering(api_healthz=health or 503) as agent:
        asked = nobody() if health is None else agent
        assert not passes(probes.ray_is_up(), asked)
        assert not passes(probes.can_take_requests(port), asked)
        assert not passes(probes.needs_no_restart(port), asked)


def test_a_server_may_speak_https(tmp_path: Path) -> None:
    """Whoever signed its certificate; one that speaks plainly where TLS is asked is not ready."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made = make_certificates(tmp_path)
    context.load_cert_chain(made.certfile, made.keyfile)
    with answering(api_healthz=200) as agent:
        with answering(context, ready=200, live=503) as port:
            assert passes(probes.can_take_requests(port, is_tls=True), agent)
            assert not passes(probes.needs_no_restart(port, is_tls=True), agent)
        with answering(ready=200, live=200) as port:
            assert not passes(probes.can_take_requests(port, is_tls=True), agent)


def test_a_server_that_listens_and_says_nothing_is_hung() -> None:
    """Its event loop does not turn: /live would be answered by nothing else."""
    with answering(api_healthz=200) as agent, socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert not passes(probes.can_take_requests(port), agent)
        assert not passes(probes.needs_no_restart(port), agent)
