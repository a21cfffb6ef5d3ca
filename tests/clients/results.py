"""A client's script, and what it tells its test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.clients import environments

SCRIPTS = Path(__file__).parent / "scripts"


class Results:
    """What each step of a script has returned."""

    def __init__(self, printed: str) -> None:
        self._outcomes: dict[str, dict[str, Any]] = json.loads(printed)

    def __getitem__(self, step: str) -> Any:
        """Raises AssertionError with the client's traceback if the step has failed."""
        outcome = self._outcomes[step]
        assert "error" not in outcome, f"in the client:\n{outcome['error']}"
        return outcome["value"]


def run_script(
    python: Path, client: str, urls: Mapping[str, str], folder: Path, *more: str
) -> Results:
    """Run a client's script in its environment.

    Args:
        python: the interpreter of the environment.
        urls: those of the servers, by kind.
        folder: an empty one.
        more: what else the script wants to know.
    """
    script = str(SCRIPTS / f"with_{client}.py")
    done = environments.run(python, [script, json.dumps(urls), *more], folder)
    print(done.stderr)  # noqa: T201  # pytest shows it with a failure
    return Results(done.stdout)


def decoded(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Name and arguments of tool calls, the latter no longer as text."""
    return [(name, json.loads(arguments)) for name, arguments in calls]
