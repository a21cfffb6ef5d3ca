"""What travels in the rings: calls to all workers, and their replies.

    engine core                                                 worker of each rank
    broadcast ring --[method, args, kwargs, output_rank]-->     all execute it
    response ring  <--[method, call, result]--------------      the output rank, or all if it is nil
    response ring  <--["failed", call, …]-----------------      any rank, also out of turn

A step whose plan says that masks will follow takes two calls, and has one reply, to the first:

    broadcast ring --["execute_model", [plan], …]----------     forward pass; no reply yet
    broadcast ring --["sample_tokens", [masks, call], …]---     sample; reply to that `call`

The methods are the structs below and no others: the first element of a call selects one, its
arguments are decoded as that method's own types, and anything else is a WireError before any code
of ours is looked up. All is msgpack through `engine.codec`, large arrays out of band. Nothing is
unpickled, so what reaches a ring cannot run.

Calls have no number of their own. They are executed in the order of the ring, so the sequence of a
call in the ring is its number, and a reply names it.
"""

import time
import traceback
from typing import Generic, Literal, Protocol, TypeVar, assert_never

import msgspec

from engine.codec import Decoder, Encoder
from engine.errors import ConfigError, RaywireError
from engine.sockets import MAX_MESSAGE_BYTES
from engine.step import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
    WorkerReport,
    WorkerStats,
)
from engine.wire import Message, sendable

Args = TypeVar("Args")
Kwargs = TypeVar("Kwargs")
Result = TypeVar("Result")

MAX_CHARS = 16_000
"""Of a message or a traceback, of which the end is kept."""


class Worker(Protocol):
    """What a call can reach: `workers.worker.Worker`, or a fake."""

    def load(self) -> WorkerReport: ...
    def initialize_kv_cache(self, spec: KVCacheSpec) -> None: ...
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None: ...
    def sample_tokens(self, masks: TokenMasks) -> ModelRunnerOutput | None: ...
    def statistics(self) -> WorkerStats: ...
    def profile(self, is_start: bool, directory: str) -> None: ...
    def close(self) -> None: ...


# ------------------------------------------------------------------------------ calls


class NoKwargs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keyword arguments of a method that has none."""


class ProfileKwargs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    is_start: bool
    directory: str


class _Call(Message, Generic[Args, Kwargs], frozen=True):
    args: Args
    kwargs: Kwargs
    output_rank: int | None = None
    """The rank that replies; None: every rank does."""


class Load(_Call[tuple[()], NoKwargs], frozen=True, tag="load"): ...


class InitializeKVCache(
    _Call[tuple[KVCacheSpec], NoKwargs], frozen=True, tag="initialize_kv_cache"
): ...


class ExecuteModel(_Call[tuple[SchedulerOutput], NoKwargs], frozen=True, tag="execute_model"): ...


class SampleTokens(_Call[tuple[TokenMasks, int], NoKwargs], frozen=True, tag="sample_tokens"):
    """With the number of the `execute_model` call that it completes."""


class Statistics(_Call[tuple[()], NoKwargs], frozen=True, tag="statistics"): ...


class Profile(_Call[tuple[()], ProfileKwargs], frozen=True, tag="profile"): ...


Call = Load | InitializeKVCache | ExecuteModel | SampleTokens | Statistics | Profile

load = Load((), NoKwargs())
statistics = Statistics((), NoKwargs())


def initialize_kv_cache(spec: KVCacheSpec) -> InitializeKVCache:
    return InitializeKVCache((spec,), NoKwargs())


def profile(is_start: bool, directory: str) -> Profile:
    return Profile((), ProfileKwargs(is_start, directory))


def execute_model(plan: SchedulerOutput, output_rank: int) -> ExecuteModel:
    return ExecuteModel((plan,), NoKwargs(), output_rank)


def sample_tokens(masks: TokenMasks, number: int, output_rank: int) -> SampleTokens:
    return SampleTokens((masks, number), NoKwargs(), output_rank)


def is_answered(call: Call) -> bool:
    """Whether the rank that replies does so as soon as it has executed `call`."""
    return not (isinstance(call, ExecuteModel) and call.args[0].awaits_masks)


def method(call: "Call | Reply") -> str:
    return str(call.__struct_config__.tag)


def label(call: Call) -> str:
    """A call as an operator knows it: `execute_model step 17`."""
    if isinstance(call, ExecuteModel):
        return f"execute_model step {call.args[0].step}"
    if isinstance(call, SampleTokens):
        return f"sample_tokens step {call.args[0].step}"
    return method(call)


def perform(worker: Worker, call: Call, number: int) -> "Reply | None":
    """Execute call `number` and return the reply; None where this rank has no result to give.

    A failure is the worker's end, and raises, with one exception: a profiler that does not work
    (no such folder, started twice) is no reason to stop serving.
    """
    match call:
        case Load():
            return Loaded(number, worker.load())
        case InitializeKVCache(args=(spec,)):
            worker.initialize_kv_cache(spec)
            return Initialized(number, None)
        case ExecuteModel(args=(plan,)):
            output = worker.execute_model(plan)
            return None if output is None else Executed(number, output)
        case SampleTokens(args=(masks, executed)):
            output = worker.sample_tokens(masks)
            return None if output is None else Executed(executed, output)
        case Statistics():
            return Counted(number, worker.statistics())
        case Profile(kwargs=kwargs):
            try:
                worker.profile(kwargs.is_start, kwargs.directory)
            except (OSError, RuntimeError, ValueError, RaywireError) as error:
                return Refused(number, sendable(f"{type(error).__name__}: {error}")[:MAX_CHARS])
            return Profiled(number, None)
    assert_never(call)


# ---------------------------------------------------------------------------- replies


class _Reply(Message, Generic[Result], frozen=True):
    call: int
    """Sequence of the call in the broadcast ring."""
    result: Result


class Loaded(_Reply[WorkerReport], frozen=True, tag="load"): ...


class Initialized(_Reply[None], frozen=True, tag="initialize_kv_cache"): ...


class Executed(_Reply[ModelRunnerOutput], frozen=True, tag="execute_model"): ...


class Counted(_Reply[WorkerStats], frozen=True, tag="statistics"): ...


class Profiled(_Reply[None], frozen=True, tag="profile"): ...


class Refused(_Reply[str], frozen=True, tag="refused"):
    """The call failed, for the reason in `result`; the worker goes on."""


class Failed(Message, frozen=True, tag="failed"):
    """The worker has failed, and ends. Sent by any rank, whoever was to reply."""

    call: int
    doing: str
    """The call's label, or "start"."""
    kind: Literal["config", "other"]
    """"config": the operator can mend it, and the message says how."""
    message: str
    traceback: str
    at_s: float
    """The machine's monotonic clock when it happened: the earliest failure is the first cause."""


Reply = Loaded | Initialized | Executed | Counted | Profiled | Refused | Failed


def describe_failure(error: Exception, *, call: int, doing: str) -> Failed:
    """Return the last message of a worker: what it was doing, and what became of it."""
    is_config = isinstance(error, ConfigError)
    lines = traceback.format_exception(error)
    return Failed(
        call=call,
        doing=doing,
        kind="config" if is_config else "other",
        message=sendable(str(error) if is_config else f"{type(error).__name__}: {error}")[
            :MAX_CHARS
        ],
        traceback=sendable("".join(lines))[-MAX_CHARS:],
        at_s=time.monotonic(),
    )


def encoder() -> Encoder:
    """Of calls and replies. A plan in which many requests begin may be large: each brings its words
    that are banned, and its blocks."""
    return Encoder(MAX_MESSAGE_BYTES)


def call_decoder() -> Decoder[Call]:
    return Decoder(Call, MAX_MESSAGE_BYTES)


def reply_decoder() -> Decoder[Reply]:
    return Decoder(Reply, MAX_MESSAGE_BYTES)
