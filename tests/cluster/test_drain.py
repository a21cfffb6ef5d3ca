"""`raywire drain`, against real servers."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.cli import cli
from engine.errors import ServerError
from tests.helpers.scripted_models import make_slow_model
from tests.helpers.server import running_server
from tests.helpers.streams import BackgroundStream


def drain(port: int, timeout_s: float = 60.0) -> tuple[int, BaseException | None]:
    result = CliRunner().invoke(cli, ["drain", "--port", str(port), "--timeout", str(timeout_s)])
    return result.exit_code, result.exception


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-dp", "2")], ids=["one API server", "two"])
def test_streams_end_before_the_server_does(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Whichever process answers for it; another server on this machine is left alone."""
    model = str(make_slow_model(tmp_path, 0.02))
    named = ("--served-model-name", "m")
    with running_server(model) as other, running_server(model, *named, *flags) as server:
        stream = BackgroundStream(server, max_tokens=100)
        assert stream.started.wait(20)

        assert drain(server.port) == (0, None)

        stream.join(10)
        assert stream.finish_reasons == ["length"]
        assert server.process.wait(20) == 0
        with other.http() as client:
            assert client.get("/ready").status_code == 200


@pytest.mark.slow
def test_a_server_that_takes_longer_is_named(tmp_path: Path) -> None:
    model = str(make_slow_model(tmp_path, 0.05))
    flags = ("--served-model-name", "m", "--shutdown-timeout", "60")
    with running_server(model, *flags) as server:
        stream = BackgroundStream(server, max_tokens=100)
        assert stream.started.wait(20)
        code, error = drain(server.port, 0.3)

        assert code == 1
        assert isinstance(error, ServerError)
        assert f"pid {server.process.pid}" in str(error)
        stream.join(30)
        assert server.process.wait(20) == 0


def test_no_server_is_no_failure() -> None:
    assert drain(1) == (0, None)
