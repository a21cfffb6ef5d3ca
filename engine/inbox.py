"""What the core's main thread is told: the in-memory queue between the input thread and the loop.

Five of the items come from a message of an API server, already decoded and prepared. The others
exist in this process only and are refused from a socket (`wire.FROM_SOCKET`).
"""

from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from engine.request import Request
from engine.wire import StartWave, UtilityCall


class Add(NamedTuple):
    """RequestType.ADD, prepared."""

    request: Request


class Abort(NamedTuple):
    """RequestType.ABORT."""

    request_ids: list[str]


class Wave(NamedTuple):
    """RequestType.START_DP_WAVE."""

    start: StartWave


class Call(NamedTuple):
    """RequestType.UTILITY."""

    call: UtilityCall


class Fenced(NamedTuple):
    """RequestType.FENCE, of our epoch or a later one."""

    epoch: int


class ExecutorFailed(NamedTuple):
    """RequestType.EXECUTOR_FAILED: the executor's monitor has seen a worker die."""

    cause: str


class Wakeup(NamedTuple):
    """RequestType.WAKEUP: nothing but a reason to look at the flags."""


class ThreadCrashed(NamedTuple):
    """A thread of this process has ended with an error, so the process must."""

    thread: str
    error: BaseException


Item: TypeAlias = Add | Abort | Wave | Call | Fenced | ExecutorFailed | Wakeup | ThreadCrashed

# SimpleQueue: its `get` sleeps in the kernel, and its `put` is safe inside a signal handler.
Inbox: TypeAlias = SimpleQueue[Item]
AbortQueue: TypeAlias = SimpleQueue[list[str]]
