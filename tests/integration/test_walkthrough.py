"""The commands of docs/cluster.md, word for word, as a new user types them on two nodes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from tests.helpers.server import ROOT, wait_for
from tests.integration.hosts import Host, hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DOCUMENT = ROOT / "docs" / "cluster.md"


@dataclass
class Shell:
    """A user's shell on a node: it remembers what was exported."""

    host: Host
    exports: list[str] = field(default_factory=list)

    def type(self, command: str) -> str:
        """Run a command to its end, and return what it said."""
        if command.startswith("export "):
            self.exports.append(command)
        return self.host.run(
            "bash", "-ec", "\n".join([*self.exports, command]), timeout_s=120
        ).stdout


def steps() -> Iterator[tuple[str, str]]:
    """Node and command of each line with a prompt, as far as its backslashes reach."""
    blocks = re.findall(r"```console\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for line in re.split(r"\n(?=node)", "\n".join(blocks)):
        node, command = line.strip().split("$ ", 1)
        yield node, command


def _says(shell: Shell, command: str, text: str) -> bool:
    return text in shell.type(command)


def test_the_walk_through_works_word_for_word() -> None:
    """A cluster of two nodes, the job, its log, its processes on the other node, an answer, and
    nothing but Ray after the stop."""
    said: dict[str, str] = {}
    with hosts(2) as machines:
        shells = {host.name: Shell(host) for host in machines}
        for node, command in steps():
            if command.startswith("ray job logs"):
                is_ready = partial(_says, shells[node], command, "ready total=")
                wait_for(is_ready, "the server is ready", 240, interval_s=2)
            said[command.split(" -")[0]] = shells[node].type(command)
        left = [p.args for host in machines for p in host.processes()]

    assert re.search(r"DP0.*DP1", said["ray job logs serve"], re.DOTALL)
    assert len(said["ps"].splitlines()) == 2, "a core and its worker"
    assert '"text":' in said["curl"]
    assert not [args for args in left if re.match(r"RAYWIRE|ray::(EngineCore|DPCoord)", args)]


def test_the_readmes_commands_are_the_walk_throughs() -> None:
    """So that they are tried too."""
    typed = [line for _, command in steps() for line in command.splitlines()]
    readme = re.findall(r"^node\d\$ (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)

    assert len(readme) >= 3
    for line in readme:
        assert any(line.split("  #")[0].rstrip(" \\") in each for each in typed), line
