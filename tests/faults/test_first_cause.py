"""One root-cause line for each fault, which says all that can be known of it."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.helpers.scripted_models import make_scripted_model, make_slow_model
from tests.helpers.server import Server, running_server, wait_for
from tests.helpers.streams import BackgroundStream


def error_lines(server: Server) -> list[str]:
    return re.findall(r"^ERROR .*$", server.log, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.row("F-05")
@pytest.mark.parametrize("num_api_servers", ["1", "2"])
def test_ranks_that_fail_alike_have_one_first_cause(tmp_path: Path, num_api_servers: str) -> None:
    """Two ranks whose models raise in the same step: the first of them is told, and no other."""
    model = make_scripted_model(
        tmp_path, kind="cycle", token_ids=[97], step_delay_s=0.02, raise_at_step=20
    )
    flags = ("-dp", "2", "--api-server-count", num_api_servers, "--served-model-name", "m")
    with running_server(str(model), *flags) as server:
        streams = [
            BackgroundStream(server, {"X-data-parallel-rank": str(rank)}, max_tokens=4000)
            for rank in (0, 1)
        ]
        for stream in streams:
            stream.join()

        assert server.wait() == 1
        [line] = error_lines(server)
        assert re.search(r"first cause: engine core DP[01]: worker DP[01]_PP0_TP0 pid=\d+", line)
        assert "step 20" in line
        server.assert_gone()


@pytest.mark.slow
@pytest.mark.row("F-01")
@pytest.mark.parametrize("flags", [("-tp", "2"), ("-dp", "2")], ids=" ".join)
def test_a_killed_core_is_told_with_what_it_was_doing(
    tmp_path: Path, flags: tuple[str, str]
) -> None:
    """Process, pid, node, signal, the step it was in, and that memory was not the reason."""
    model = make_slow_model(tmp_path)
    with running_server(str(model), *flags, "--served-model-name", "m") as server:
        stream = BackgroundStream(server, {"X-data-parallel-rank": "0"}, max_tokens=4000)
        # At 50 tokens a second some heartbeats have told of its steps by then.
        wait_for(lambda: len(stream.events) > 200, "200 tokens", 30)
        core = server.raywire_processes()["RAYWIRE::EngineCore_DP0"]
        os.kill(core.pid, signal.SIGKILL)
        stream.join()

        assert server.wait() == 1
        [line] = error_lines(server)
        who = f"EngineCore_DP0 pid={core.pid} node={socket.gethostname()} killed by SIGKILL"
        assert who in line
        assert re.search(r" in step \d+, [A-Z]+ for \d+\.\d s; not by the kernel's OOM", line), line
