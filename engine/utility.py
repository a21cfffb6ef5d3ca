"""UTILITY: the methods that an API server may call on an engine core. Nothing else can be called.

The list is fixed here, with the types of arguments and result, and both sides use it: the API
server through `make_call` and `read_answer`, the engine core through `answer`. A name that is not
on it is never looked up anywhere, so neither attributes of the core nor methods added later can be
reached. Calls run on the core's main thread, between two steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec

from engine.errors import RequestFailedError, WireError
from engine.step import WorkerStats
from engine.wire import Message, Rank, SchedulerStats, Seconds, UtilityCall, UtilityOutput

Directory = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]

NO_PROFILER = "the profiler does not run"
"""Why `profile` cannot stop it: the caller has not started it, or another core has taken the place
of the one in which he did."""


class Statistics(Message, frozen=True):
    """Answer to `statistics`: the core's own counters, and those of each of its workers."""

    scheduler: SchedulerStats
    workers: list[WorkerStats]


class Target(Protocol):
    """What the methods run on. Each may raise RequestFailedError, whose text goes to the caller."""

    def statistics(self) -> Statistics: ...

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False while requests hold blocks."""

    def profile(self, is_start: bool, directory: str) -> None:
        """Start a profiler on every worker, or stop it, which writes the traces."""

    def drop_client(self, client_index: int, arrived_before: float) -> int:
        """Abort what an API server has sent that is gone. Returns how many requests that were.

        Args:
            client_index: of the API server; another may have it by now.
            arrived_before: seconds since the epoch; what came later is the other one's.
        """


@dataclass(frozen=True, slots=True)
class Method:
    """One entry of the list: the types that travel, and what runs."""

    arguments: Any
    """A tuple type: count and types of the arguments are checked against it."""

    result: Any
    run: Callable[..., object]


METHODS: Mapping[str, Method] = {
    "statistics": Method(tuple[()], Statistics, lambda target: target.statistics()),
    "reset_prefix_cache": Method(tuple[()], bool, lambda target: target.reset_prefix_cache()),
    "profile": Method(
        tuple[bool, Directory],
        None,
        lambda target, is_start, directory: target.profile(is_start, directory),
    ),
    "drop_client": Method(
        tuple[Rank, Seconds],
        int,
        lambda target, client_index, before: target.drop_client(client_index, before),
    ),
}


def make_call(
    client_index: int, call_id: int, method: str, args: tuple[object, ...]
) -> UtilityCall:
    """Return the message that calls `method`.

    Raises:
        WireError: no such method, or arguments that it does not take.
    """
    encoded = msgspec.msgpack.encode(args)
    _decode_arguments(method, encoded)
    return UtilityCall(client_index, call_id, method, msgspec.Raw(encoded))


def read_answer(method: str, output: UtilityOutput) -> Any:
    """Return the result of `method`, of the type that `METHODS` says.

    Raises:
        RequestFailedError: the call failed; the text says why.
        WireError: the result is not of that type.
    """
    if output.failure is not None:
        raise RequestFailedError(f"{method} failed: {output.failure}")
    try:
        return msgspec.msgpack.decode(output.result, type=_find(method).result)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"undecodable result of {method}: {error}") from error


def answer(call: UtilityCall, target: Target) -> UtilityOutput:
    """Run `call` on `target`. A refused or failed call gives a failure text, never an exception;
    only errors that end the engine core pass."""
    try:
        args = _decode_arguments(call.method, call.args)
        result = _find(call.method).run(target, *args)
    except (WireError, RequestFailedError) as error:
        return UtilityOutput(call.call_id, failure=str(error))
    return UtilityOutput(call.call_id, result=msgspec.Raw(msgspec.msgpack.encode(result)))


def _find(method: str) -> Method:
    found = METHODS.get(method)
    if found is None:
        raise WireError(f"no utility method {method[:80]!r}; there are {', '.join(METHODS)}")
    return found


def _decode_arguments(method: str, encoded: bytes | msgspec.Raw) -> tuple[Any, ...]:
    try:
        args: tuple[Any, ...] = msgspec.msgpack.decode(encoded, type=_find(method).arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"wrong arguments for {method}: {error}") from error
    return args
