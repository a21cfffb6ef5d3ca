"""One line per event, with process, pid, and the request's id where it is known."""

import logging
import os
import re
import time
from collections.abc import Iterator

import pytest

from engine import log

SWITCHES = ("logThreads", "logProcesses", "logMultiprocessing", "_srcfile")


@pytest.fixture(autouse=True)
def _restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    switches = {name: getattr(logging, name) for name in SWITCHES}
    yield
    root.handlers, root.level = handlers, level
    for name, value in switches.items():
        setattr(logging, name, value)


def test_a_line_says_who_wrote_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Level, time, process, pid, module, then the message with its facts."""
    log.configure("EngineCore_DP0")
    logging.getLogger("engine.x").info("engine ready num_gpu_blocks=%d", 7)

    assert re.fullmatch(
        rf"INFO \d\d-\d\d \d\d:\d\d:\d\d EngineCore_DP0 pid={os.getpid()} engine\.x\]"
        r" engine ready num_gpu_blocks=7\n",
        capsys.readouterr().err,
    )


def test_the_time_is_that_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where several lines are of one second."""
    log.configure("p")
    record = logging.LogRecord("x", logging.INFO, "", 0, "text", None, None)
    for second in (0, 0, 1, 3600):
        record.created = 1_700_000_000.5 + second
        logging.getLogger().handle(record)

    times = [line.split()[2] for line in capsys.readouterr().err.splitlines()]
    expected = [time.localtime(1_700_000_000 + second) for second in (0, 0, 1, 3600)]
    assert times == [time.strftime("%H:%M:%S", each) for each in expected]


def test_the_request_id_is_added_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """A line below the API can be found by the id that the client saw."""
    log.configure("APIServer_0")
    token = log.request_id.set("cmpl-1")
    logging.getLogger("api.x").info("inside")
    log.request_id.reset(token)
    logging.getLogger("api.x").info("outside")

    inside, outside = capsys.readouterr().err.splitlines()
    assert inside.endswith("inside request_id=cmpl-1")
    assert outside.endswith("outside")


def test_setting_up_twice_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A second set-up, as after a fork, replaces the first; its level counts."""
    log.configure("first")
    log.configure("second", "WARNING")
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("once")

    (line,) = capsys.readouterr().err.splitlines()
    assert " second " in line
    assert line.endswith("once")
