"""A head that goes and comes back is told of. A real one is in tests/faults/test_lost_head.py."""

import logging
import socket

import pytest

from cluster.ray_head import watch_head
from tests.helpers.wires import free_port


@pytest.mark.row("F-18")
def test_a_head_that_goes_and_comes_back_is_told_of_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With what it means for the server; a head that stays is nothing to speak of."""
    caplog.set_level(logging.WARNING)
    port = free_port()
    heads: list[socket.socket] = []
    is_there = iter([True, True, False, False, True, True])

    def wait_closed(_: float) -> bool:
        while heads:
            heads.pop().close()
        match next(is_there, None):
            case True:
                heads.append(socket.create_server(("127.0.0.1", port)))
            case None:
                return True
        return False

    watch_head(f"127.0.0.1:{port}", wait_closed)

    gone, back = [record.getMessage() for record in caplog.records]
    assert f"127.0.0.1:{port} does not answer" in gone
    assert "no lost rank can be replaced" in gone
    assert "answers again" in back
