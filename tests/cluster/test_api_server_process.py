"""An API server process as the command sees it. Whole servers are in tests/faults."""

import multiprocessing
import socket

import pytest

from api.config import ApiConfig
from cluster import api_server_process
from cluster.api_server_process import ApiServerConfig
from engine.errors import EXIT_FAILED


def test_one_that_cannot_hear_the_command_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """A thread of its own listens. Without it the process would serve on, deaf to every death and
    every stop."""
    config = ApiServerConfig(
        api=ApiConfig(served_model_names=("m",)),
        client_index=1,
        num_engines=1,
        step_timeout_s=60.0,
        log_level="INFO",
    )
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as http_socket:
        process = multiprocessing.get_context("spawn").Process(
            target=api_server_process.main, args=(config, http_socket, theirs)
        )
        process.start()
        try:
            ours.send_bytes(b"\xc1")  # which is no message
            process.join(30)
            assert process.exitcode == EXIT_FAILED
        finally:
            process.kill()
            process.join()
    log = capfd.readouterr().err
    assert "APIServer_1" in log
    assert "nobody listens to the command any more; ending" in log
    assert "DecodeError" in log
