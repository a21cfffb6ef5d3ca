"""Schemathesis, in an environment of its own: thousands of requests made of /openapi.json, good and
bad, to a real server. Here it is the client that is after us.

What it finds it tells as a command of curl, and finds again by its seed.
"""

import re
from pathlib import Path

import pytest

from tests.clients import environments
from tests.helpers.server import running_server

CLIENT = "schemathesis"
SERVERS = ()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MIN_REQUESTS = 5000
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
OPTIONS = (
    *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"),
    *("--max-examples", "40", "--seed", "1", "--generation-database", "none"),
    *("--continue-on-failure", "--no-color", "--request-timeout", "60"),
)


def test_thousands_of_made_up_requests_meet_no_failure(python: Path, tmp_path: Path) -> None:
    """No 5xx, and each answer is what the document says: status, content type, methods, JSON, and
    the events of streams."""
    with running_server("scripted", "--max-model-len", "512") as server:
        command = ["-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *OPTIONS]
        done = environments.run(python, command, tmp_path, timeout_s=1500)
        assert re.findall(r'^.*" 5\d\d .*$', server.log, flags=re.MULTILINE) == []
        assert "ERROR" not in server.log
        with server.http() as http:  # and it serves on
            assert http.post("/v1/completions", json={"prompt": "ok"}).status_code == 200

    generated = re.search(r"(\d+) generated, \1 passed", done.stdout)
    assert generated is not None, done.stdout
    assert int(generated[1]) >= MIN_REQUESTS
