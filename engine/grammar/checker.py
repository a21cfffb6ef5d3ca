"""Has grammars compiled in a process of its own first, and kills it where that takes too long.

Used by `compiler`, one for each of its threads; `check_process` is the other side and tells why.
"""

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import time

import msgspec

from engine import leash
from engine.errors import InvalidRequestError, RequestFailedError
from engine.lifecycle import describe_exit
from engine.limits import MAX_COMPILE_S
from engine.structured_output import PARAM, StructuredOutput
from engine.thinning import ThinnedCount

logger = logging.getLogger(__name__)


WALL_FACTOR = 6.0
"""So much longer at most on the clock, should it neither end nor compute."""

START_TIMEOUT_S = 30.0
"""For the process to appear, on a machine that is busy."""

_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""How a process ends for no fault of the grammar's: the kernel has no memory left, it did not get
the processor, or we stop. What is refused for its own fault is refused for good."""

_LAST_WORDS_S = 0.2

LENGTH_BYTES = 4

_MODULE = "engine.grammar.check_process"


class Question(msgspec.Struct, array_like=True):
    """What to compile."""

    output: StructuredOutput
    cpu_s: float
    """How much of the processor's time it may take. Beyond, SIGPROF ends the process."""


class Verdict(msgspec.Struct, array_like=True):
    """What came of a compilation."""

    error: str | None
    num_bytes: int = 0
    """That the compiled grammar takes."""


class Checker:
    """One process, which is started when it is needed. Not thread-safe."""

    def __init__(self, cpu_s: float = MAX_COMPILE_S) -> None:
        self._cpu_s = cpu_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False
        self._failed_starts = ThinnedCount()
        """Since the last one that worked."""
        self._decode = msgspec.msgpack.Decoder(Verdict).decode

    def check(self, output: StructuredOutput) -> int:
        """Return how many bytes the compiled grammar takes.

        Raises:
            InvalidRequestError: it cannot be compiled, or not with the time and memory there are.
            RequestFailedError: there is no process that would do it, or it was kept from doing it.
        """
        process = self._started()
        try:
            self._send(process, msgspec.msgpack.encode(Question(output, self._cpu_s)))
            verdict = self._receive(process, self._cpu_s * WALL_FACTOR)
        except OSError:  # it has crashed or was ended, as it is meant to, or it hangs
            self.close()
            end = process.returncode
            logger.info("a structured output was not compiled: the process %s", describe_exit(end))
            if end in _FROM_OUTSIDE:
                raise RequestFailedError("structured output cannot be compiled now") from None
            raise InvalidRequestError(f"{output.kind}: {self._reason(end)}", PARAM) from None
        if verdict.error is not None:
            raise InvalidRequestError(f"{output.kind}: {verdict.error}", PARAM)
        return verdict.num_bytes

    def _reason(self, exit_code: int | None) -> str:
        if exit_code == -signal.SIGPROF:
            return f"compiling it takes longer than {self._cpu_s:g} s; make it simpler"
        return "it is too large or too deeply nested to be compiled"

    def kill(self) -> None:
        """End the process, and start none any more. From another thread; the one that uses it still
        closes it."""
        self._is_ended = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_S)  # what has ended its pipe is about to end by itself
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it has not read any more
                    pipe.close()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.close()
            try:
                self._process = leash.start_module(_MODULE, MALLOC_ARENA_MAX="1")
                if self._is_ended:
                    self._process.kill()
                self._receive(self._process, START_TIMEOUT_S)
            except OSError as error:  # of which a TimeoutError is one
                self.close()
                self._log_failed_start()
                raise RequestFailedError("structured output cannot be compiled now") from error
            self._failed_starts = ThinnedCount()
        return self._process

    def _log_failed_start(self) -> None:
        if not self._is_ended and self._failed_starts.add():
            logger.exception(
                "no process to compile structured output in attempts=%d", self._failed_starts.count
            )

    def _send(self, process: "subprocess.Popen[bytes]", body: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
        process.stdin.flush()

    def _receive(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> Verdict:
        """Raises TimeoutError, or EOFError or another OSError if there is nobody any more."""
        deadline = time.monotonic() + timeout_s
        length = self._read(process, LENGTH_BYTES, deadline)
        return self._decode(self._read(process, int.from_bytes(length, "little"), deadline))

    def _read(self, process: "subprocess.Popen[bytes]", count: int, deadline: float) -> bytes:
        assert process.stdout is not None
        data = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while len(data) < count:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                # Not `read`, which waits for all of it.
                if not (piece := os.read(process.stdout.fileno(), count - len(data))):
                    raise BrokenPipeError("the process has ended")
                data += piece
        return data
