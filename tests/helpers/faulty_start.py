"""Executors for child processes that break something on purpose, or show what cannot be seen from
outside. Each is a StartExecutor that a spawned process can import."""

import gc
import logging
from collections.abc import Callable, Sequence

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.input_thread import InputThread
from engine.output_thread import OutputThread
from engine.step import ModelRunnerOutput, SchedulerOutput, WorkerStats
from engine.wire import OutputType
from tests.helpers.fake_executor import FakeExecutor

logger = logging.getLogger(__name__)

OnFailure = Callable[[str], None]


class FreezeReporter(FakeExecutor):
    """Its statistics carry the number of frozen objects, as `num_requests`."""

    def statistics(self) -> Sequence[WorkerStats]:
        return [WorkerStats(0, 0, 0, 0, gc.get_freeze_count())]


def report_freeze(config: EngineConfig, on_failure: OnFailure) -> FakeExecutor:
    return FreezeReporter()


class MixedUp(FakeExecutor):
    """Its replies are for requests that nobody has sent."""

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return msgspec.structs.replace(super()._run(plan), request_ids=["stranger"])


def mix_up_replies(config: EngineConfig, on_failure: OnFailure) -> FakeExecutor:
    return MixedUp(on_failure=on_failure)


class LoudlyClosed(FakeExecutor):
    def close(self) -> None:
        logger.info("the workers are closed")


def lose_last_words(config: EngineConfig, on_failure: OnFailure) -> FakeExecutor:
    """DEAD cannot be sent."""

    def fail(self: OutputThread, cause: str, linger_ms: int, *, is_told: bool = True) -> bool:
        raise ZeroDivisionError("scripted fault")

    OutputThread.finish = fail  # type: ignore[method-assign]
    return LoudlyClosed(refuse_load="no such model")


def refuse_to_start(config: EngineConfig, on_failure: OnFailure) -> FakeExecutor:
    raise ConfigError("no device fits")


def break_input_thread(config: EngineConfig, on_failure: OnFailure) -> FakeExecutor:
    """The first message crashes the input thread."""

    def crash(self: InputThread, client_index: int, frames: object) -> None:
        raise ZeroDivisionError("scripted fault")

    InputThread._take = crash  # type: ignore[method-assign]
    return FakeExecutor()


def break_output_thread(config: EngineConfig, on_failure: OnFailure) -> FakeExecutor:
    """The first outputs crash the output thread; last words still work."""
    send = OutputThread._send

    def crash(self: OutputThread, socket: object, kind: OutputType, message: object) -> None:
        if kind is OutputType.OUTPUTS:
            raise ZeroDivisionError("scripted fault")
        send(self, socket, kind, message)  # type: ignore[arg-type]

    OutputThread._send = crash  # type: ignore[method-assign]
    return FakeExecutor()
