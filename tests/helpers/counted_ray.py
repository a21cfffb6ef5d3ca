"""`python -m cluster`, which notes each call that it makes of Ray: one line in the file that
COUNTED_RAY_FILE names."""

import functools
import os
from collections.abc import Callable
from typing import Any

from cluster import ray_session
from cluster.__main__ import main

FILE_VARIABLE = "COUNTED_RAY_FILE"

_FUNCTIONS = ("get", "kill", "nodes", "put", "wait")


def _noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with open(os.environ[FILE_VARIABLE], "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
        return function(*args, **kwargs)

    return call


def _load_noted(load: Callable[[], Any]) -> Any:
    ray = load()
    from ray.actor import ActorMethod
    from ray.remote_function import RemoteFunction

    for name in _FUNCTIONS:
        setattr(ray, name, _noted(name, getattr(ray, name)))
    for owner in (ActorMethod, RemoteFunction):
        owner._remote = _noted("remote", owner._remote)
    return ray


if __name__ == "__main__":
    ray_session.load_ray = functools.partial(_load_noted, ray_session.load_ray)
    main()
