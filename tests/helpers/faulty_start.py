"""Executors for child processes that break something on purpose, or show what cannot be seen from
outside. Each is a StartExecutor that a spawned process can import."""

import gc
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.input_thread import InputThread
from engine.output_thread import OutputThread
from engine.step import WorkerStats
from engine.wire import OutputType
from tests.helpers.fake_executor import FakeExecutor

OnFailure = Callable[[str], None]


class FreezeReporter(FakeExecutor):
    """Its statistics carry the number of frozen objects, as `num_requests`."""

    def statistics(self) -> Sequence[WorkerStats]:
        return [WorkerStats(0, 0, 0, 0, gc.get_freeze_count())]


def report_freeze(config: EngineConfig, on_failure: OnFailure) -> FakeExecutor:
    return FreezeReporter()


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
