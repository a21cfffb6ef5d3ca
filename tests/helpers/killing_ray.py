"""`python -m cluster`, which has Ray kill the last rank's engine core for each line that is written
into the pipe that KILLING_RAY_PIPE names, as `ray.kill` in an operator's hands would."""

import os
import threading
from typing import Any

from cluster import launch
from cluster.__main__ import main
from cluster.ray_engines import RayEngines

PIPE_VARIABLE = "KILLING_RAY_PIPE"

_servers: list[Any] = []


class _Remembered(RayEngines):
    """The engine cores of this command."""

    def place(self, model: Any) -> Any:
        _servers.append(self)
        return super().place(model)


def _obey(path: str) -> None:
    while True:
        with open(path, encoding="utf-8") as pipe:  # waits for a writer
            for _ in pipe:
                [engines] = _servers
                engines._lease.ray.kill(engines._engines[-1].handle)


if __name__ == "__main__":
    threading.Thread(target=_obey, args=(os.environ[PIPE_VARIABLE],), daemon=True).start()
    vars(launch)["RayEngines"] = _Remembered
    main()
