"""What the scripts beside this file share. They run in the environment of their client: nothing
but the standard library may be imported here.

    @step
    def lists_models() -> list[str]:
        return [model.id for model in openai.OpenAI(base_url=server("echo")).models.list()]

    if __name__ == "__main__":
        main()

The results of all steps go to standard output as one JSON object, which the tests read; anything
else that is printed goes to standard error.
"""

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

Step = TypeVar("Step", bound=Callable[[], Any])

_steps: list[Callable[[], Any]] = []


def step(function: Step) -> Step:
    """Mark something to do; what it returns must be fit for JSON. May be a coroutine function."""
    _steps.append(function)
    return function


def server(name: str, path: str = "/v1") -> str:
    """The URL of one of the servers that were started for the clients."""
    return str(json.loads(sys.argv[1])[name]) + path


def main() -> None:
    """Take all steps, in order, whatever happens to one of them."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        json.dump({function.__name__: _outcome(function) for function in _steps}, out)


def _outcome(function: Callable[[], Any]) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        result = function()
        value = asyncio.run(result) if inspect.iscoroutine(result) else result
        outcome = {"value": json.loads(json.dumps(value))}
    except Exception:  # noqa: BLE001  # the test shows it
        outcome = {"error": traceback.format_exc()}
    sys.stderr.write(f"{function.__name__}: {time.monotonic() - began_s:.2f} s\n")
    return outcome
