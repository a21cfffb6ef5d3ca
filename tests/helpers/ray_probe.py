"""A driver with one actor per node, started by `tests/integration/test_hosts.py` on a host.

    python -m tests.helpers.ray_probe RESOURCE…

Each argument is a custom resource that one node has. Prints a JSON line for each actor, then the
running number of every round of calls, for ever.
"""

import itertools
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import ray


class Probe:
    """Says where it is."""

    def look(self, name: str) -> dict[str, Any]:
        (Path("/dev/shm") / f"probe-{name}").touch()
        return {
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "shm": [path.name for path in Path("/dev/shm").glob("probe-*")],
            "tmp": os.environ["TMPDIR"],
        }

    def count(self, number: int) -> int:
        return number


def main(names: list[str]) -> None:
    ray.init(log_to_driver=False)
    make: Any = ray.remote(Probe)
    actors = [make.options(resources={name: 0.1}).remote() for name in names]
    for name, actor in zip(names, actors, strict=True):
        _say(json.dumps(ray.get(actor.look.remote(name))))
    for number in itertools.count():
        _say(str(ray.get([actor.count.remote(number) for actor in actors])[0]))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
