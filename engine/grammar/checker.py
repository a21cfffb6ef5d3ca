"""Has grammars compiled in a process of its own first, and kills it where that takes too long.

Used by `compiler`, one for each of its threads; `check_process` is the other side and tells why.
"""

import logging
import os
import selectors
import subprocess
import time

import msgspec

from engine import leash
from engine.errors import InvalidRequestError, RequestFailedError
from engine.lifecycle import describe_exit
from engine.structured_output import PARAM, StructuredOutput

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.5
"""For one grammar: with a process that has to start again, its client knows within two seconds.
Those that people write take milliseconds."""

START_TIMEOUT_S = 30.0
"""For the process to appear, on a machine that is busy."""

LENGTH_BYTES = 4

_MODULE = "engine.grammar.check_process"


class Verdict(msgspec.Struct, array_like=True):
    """What came of a compilation."""

    error: str | None
    num_bytes: int = 0
    """That the compiled grammar takes."""


class Checker:
    """One process, which is started when it is needed. Not thread-safe."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._decode = msgspec.msgpack.Decoder(Verdict).decode

    def check(self, output: StructuredOutput) -> int:
        """Return how many bytes the compiled grammar takes.

        Raises:
            InvalidRequestError: it cannot be compiled, or not with the time and memory there are.
            RequestFailedError: there is no process that would do it.
        """
        process = self._started()
        try:
            self._send(process, msgspec.msgpack.encode(output))
            verdict = self._receive(process, self._timeout_s)
        except TimeoutError:
            self.close()
            raise InvalidRequestError(
                f"{output.kind}: compiling it takes longer than {self._timeout_s:g} s; make it"
                " simpler",
                PARAM,
            ) from None
        except OSError:  # it has crashed, as it is meant to
            process.wait(1.0)
            end = describe_exit(process.returncode)
            logger.info("a structured output could not be compiled: the process was %s", end)
            self.close()
            raise InvalidRequestError(
                f"{output.kind}: it is too large or too deeply nested to be compiled", PARAM
            ) from None
        if verdict.error is not None:
            raise InvalidRequestError(f"{output.kind}: {verdict.error}", PARAM)
        return verdict.num_bytes

    def kill(self) -> None:
        """End the process, from another thread; the one that uses it still closes it."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = leash.start_module(_MODULE, MALLOC_ARENA_MAX="1")
            try:
                self._receive(self._process, START_TIMEOUT_S)
            except (TimeoutError, OSError) as error:
                self.close()
                logger.exception("no process to compile structured output in")
                raise RequestFailedError("structured output cannot be compiled now") from error
        return self._process

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
