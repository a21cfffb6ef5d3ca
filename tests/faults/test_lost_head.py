"""The head of a Ray cluster dies, and nobody has kept what it knew."""

import re
import time
from pathlib import Path

import pytest

from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import wait_for
from tests.helpers.streams import BackgroundStream
from tests.integration.hosts import hosts
from tests.integration.ray_cluster import OURS, ray_cluster, serving_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RECONNECT_S = 15
"""How long Ray's nodes wait for their head, instead of a minute."""


@pytest.mark.row("F-18")
def test_a_server_whose_head_is_gone_serves_until_its_node_ends_and_then_ends(
    tmp_path: Path,
) -> None:
    """Tokens need no head, so streams go on. Ray's nodes give up by and by and take the engine
    cores with them: streams get an error, the exit code is not 0, and nothing of ours is left."""
    model = make_scripted_model(tmp_path, kind="cycle", token_ids=list(b"abc"), step_delay_s=0.02)
    waiting = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S)}
    with hosts(2) as (head, two), two.network():
        cluster = ray_cluster([head, two], environment=waiting)
        flags = (str(model), "-dp", "2", "--served-model-name", "m", "--api-server-count", "1")
        where = ("--ray-address", cluster.address)
        env = cluster.environment
        with serving_on(two, tmp_path, *flags, *where, port=8001, env=env) as server:
            assert (
                re.findall(r"placed rank=\d node=\S+ \((\S+?)[,)]", server.log) == [two.address] * 2
            )
            streams = [
                BackgroundStream(server, {"X-data-parallel-rank": str(rank)}, max_tokens=6000)
                for rank in range(2)
            ]
            assert all(stream.started.wait(30) for stream in streams)
            head.crash()
            gone_at = time.monotonic()
            short = BackgroundStream(server, max_tokens=100)
            short.join(30)
            assert (short.text, short.errors) == ("abc" * 33 + "a", [])
            assert time.monotonic() - gone_at < RECONNECT_S

            server.wait_for_log("the head of the Ray cluster at .* does not answer")
            code = server.process.wait(120)
            assert code != 0, server.log
            for stream in streams:
                stream.join(10)
                assert stream.failure is not None or len(stream.errors) == 1
            assert len(re.findall("first cause: ", server.log)) <= 1, server.log
            wait_for(
                lambda: not any(OURS.match(p.args) for p in two.processes()), "all have ended", 30
            )
