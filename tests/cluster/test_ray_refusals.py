"""What is told of a Ray cluster that cannot be used, or that is open to others."""

import socket
import tomllib

import pytest

from cluster import ray_refusals
from engine.errors import ConfigError
from tests.helpers.server import ROOT

VERSION_MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.60.0
    Python: 3.12.1
This process on node 10.0.0.7 was started with:
    Ray: 2.55.1
    Python: 3.11.7
"""


def test_another_version_is_told_with_both_sides() -> None:
    """Ray and Python of the cluster and of the command are in one line."""
    line = ray_refusals.explain(RuntimeError(VERSION_MISMATCH), "10.0.0.1:6379")

    assert "10.0.0.1:6379 runs Ray 2.60.0 with Python 3.12.1" in line
    assert "this command Ray 2.55.1 with Python 3.11.7" in line
    assert "\n" not in line


def test_a_wrong_token_is_told_with_the_variables_to_set() -> None:
    """Ray's own error says so only in the text of its cause's cause."""
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    error.__cause__ = RuntimeError("Traceback …\nAuthenticationError: InvalidAuthToken: missing")

    line = ray_refusals.explain(error, "10.0.0.1:6379")

    assert "RAY_AUTH_MODE=token" in line
    assert "RAY_AUTH_TOKEN" in line


def test_any_other_refusal_becomes_one_line() -> None:
    """Whatever Ray says, on however many lines."""
    line = ray_refusals.explain(RuntimeError("no\n  such\nnode"), "auto")

    assert line == "cannot use the Ray cluster at auto: no such node"


def test_the_deepest_cause_is_told() -> None:
    """Ray's own error says that it failed; why is at the end of a traceback in its cause's text."""
    error = ConnectionError("Failed to connect")
    error.__cause__ = RuntimeError("Last error: Traceback …\n  File …\nRpcError: status 404\n")

    line = ray_refusals.explain(error, "10.0.0.1:6379")

    assert line == "cannot use the Ray cluster at 10.0.0.1:6379: RpcError: status 404"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "nowhere.invalid:6379", "a:b"])
def test_an_address_without_a_cluster_is_refused_at_once(address: str) -> None:
    """Ray would try for minutes; the message says what the address should be."""
    with pytest.raises(ConfigError, match=r"no Ray cluster can be reached at .*--ray-address"):
        ray_refusals.check_reachable(address)


def test_what_is_no_address_is_called_so() -> None:
    """In words, not in Python's."""
    with pytest.raises(ConfigError, match="at rubbish: that is no host:port"):
        ray_refusals.check_reachable("rubbish")


def test_a_silent_address_costs_less_than_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that takes no connection is given up by our deadline, not by Ray's."""
    monkeypatch.setattr(ray_refusals, "_REACH_TIMEOUT_S", 0.1)
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    port = full.getsockname()[1]
    waiting = [socket.socket() for _ in range(2)]
    for each in waiting:
        each.setblocking(False)
        each.connect_ex(("127.0.0.1", port))
    try:
        with pytest.raises(ConfigError, match="does not answer"):
            ray_refusals.check_reachable(f"127.0.0.1:{port}")
    finally:
        for each in [*waiting, full]:
            each.close()


# ------------------------------------------------------------------------------- age and openness


@pytest.mark.row("S-39")
def test_a_ray_that_web_pages_can_attack_is_refused() -> None:
    """Whatever got installed; the line says what to install."""
    for version in ("2.54.1", "2.9.3", "1.13.0", "unknown"):
        with pytest.raises(ConfigError, match=rf"Ray {version} .*ray\[default\]>=2\.55"):
            ray_refusals.check_version(version)
    for version in ("2.55.0", "2.60.0", "3.0.0.dev0"):
        ray_refusals.check_version(version)


@pytest.mark.row("S-39")
def test_the_oldest_ray_is_that_of_the_package() -> None:
    """What is asserted at the start is what installing asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [text for text in project["project"]["dependencies"] if text.startswith("ray[")]

    assert asked == [f"ray[default]>={'.'.join(map(str, ray_refusals.OLDEST_RAY))}"]


@pytest.mark.row("S-38")
def test_a_cluster_without_a_token_on_a_network_is_warned_of() -> None:
    """With the addresses, the danger and the way out; nobody is warned of the loopback device."""
    local, public = ["127.0.0.3", "::1"], ["127.0.0.3", "10.0.0.1", "fd00::2"]

    warning = ray_refusals.why_open({}, public)
    assert warning is not None
    assert "10.0.0.1, fd00::2" in warning
    assert "127.0.0.3" not in warning
    assert "RAY_AUTH_MODE=token" in warning
    assert ray_refusals.why_open({"RAY_AUTH_MODE": "disabled"}, ["node.example"]) is not None
    assert ray_refusals.why_open({"RAY_AUTH_MODE": "token"}, public) is None
    assert ray_refusals.why_open({}, local) is None
