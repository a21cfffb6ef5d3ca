"""Actors of ours on a Ray cluster, as the command that has started them sees them: what they
answer, how they end, and what Ray tells of it. Used by `ray_engines` and `hybrid`.

Nothing here imports Ray: it is handed in.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.actors import End
from cluster.deadline import Deadline
from engine.errors import EXIT_FAILED, ConfigError, ServerError

# Ray's workers have nice level 15. An engine core is no background job, and its children inherit.
RUNTIME_ENV = {"env_vars": {"RAY_worker_niceness": "0"}}

GLANCE_S = 0.1
"""How soon a wait notices that the server is being closed."""

KILL_S = 5.0
"""How long Ray may take to end actors that it was told to kill."""


@dataclass(slots=True, kw_only=True)
class Actor:
    """One actor, as the command knows it."""

    kind: str
    """What it is to the user: `engine core`."""
    title: str
    node: str
    handle: Any
    index: int | None = None
    """Of an engine core among those of this server."""
    epoch: int = 0
    """Incarnation."""
    pid: int = 0
    """0: it has said nothing so far."""
    run: Any = None
    """The call that lasts as long as the actor's work."""
    end: End | None = None
    is_lost: bool = False
    """Given up: nobody waits for its end."""

    def __str__(self) -> str:
        pid = f" pid={self.pid}" if self.pid else ""
        return f"{self.kind} {self.title} node={self.node}{pid}"


def answers(
    ray: Any,
    actors: Sequence[Actor],
    calls: Sequence[Any],
    deadline: Deadline,
    check_open: Callable[[], None],
) -> list[Any]:
    """What the actors answer to the calls; they may still be starting.

    Args:
        ray: the module.
        actors: of each call.
        calls: under way.
        deadline: of the whole start.
        check_open: raises when the server is being closed; asked all the time.

    Raises:
        ConfigError: an actor refuses its settings.
        ServerError: an actor has failed, which ends the wait for the others; or they are late.
    """
    pending = dict(zip(calls, actors, strict=True))
    found = {}
    while pending:
        # One is enough: if it has failed, nobody waits for the others.
        done, _ = ray.wait(list(pending), num_returns=1, timeout=GLANCE_S)
        for call in done:
            found[call] = _answer(ray, pending.pop(call), call)
        check_open()
        if pending and deadline.is_over:
            raise ServerError(_explain_late(list(pending.values()), deadline))
    return [found[call] for call in calls]


def _answer(ray: Any, actor: Actor, call: Any) -> Any:
    try:
        return ray.get(call)
    except Exception as error:
        if isinstance(refusal := getattr(error, "cause", None), ConfigError):
            raise ConfigError(f"on node {actor.node}: {refusal}") from error
        raise ServerError(f"{actor} could not be started: {summarize(error)}") from error


def _explain_late(late: Sequence[Actor], deadline: Deadline) -> str:
    names = [
        f"{actor} ({'started, then silent' if actor.pid else 'no sign yet'})" for actor in late
    ]
    return (
        f"Ray has not started all within {deadline.timeout_s:g} s (--startup-timeout);"
        f" missing: {', '.join(dict.fromkeys(names))}"
    )


def end_of(ray: Any, run: Any) -> End:
    """How an actor ended whose call of `run` is over."""
    try:
        end = ray.get(run)
    except Exception as error:  # noqa: BLE001 - Ray's for a dead actor, or any that it raised
        return End(exit_code=EXIT_FAILED, cause=summarize(error))
    assert isinstance(end, End)
    return end


_DEATH = re.compile(r"The actor is dead because (?:its )?(.*)", re.DOTALL)
_DETAIL = re.compile(r"\.?\s*Worker exit type: (\S+)\s+Worker exit detail: ", re.DOTALL)
_ADVICE = re.compile(r"\s*(Some common causes include|To troubleshoot).*", re.DOTALL)


def summarize(error: BaseException) -> str:
    """What an operator needs of Ray's account of a death: one line. Pure."""
    text = str(error)
    if death := _DEATH.search(text):
        told = _DETAIL.sub(r" (\1): ", _ADVICE.sub("", death[1]))
        return f"died: {' '.join(told.split())}"[:500]
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""  # of a traceback, as RayTaskError has it
    return f"failed: {type(error).__name__}: {last}"[:500]
