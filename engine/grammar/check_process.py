"""ENTRY of the process that compiles grammars first, where they may crash or run for ever.

    engine core                                          this process
    checker --[length][kind, spec]--> standard input     compile, and one mask
            <--[length][error, bytes]-- standard output

A compilation runs inside native code, recursive and not always linear: it can overflow the stack,
which no handler survives, and it cannot be stopped. So it happens here before it happens in the
engine core: on a stack that is smaller than any it will have there, with bounded memory, and ended
when its time is over. What survives is harmless there too. The vocabulary is bytes only, so this
process is small, and knows no model. `checker` starts it, and ends it; it has no title of ours,
since it comes and goes, and is counted nowhere.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from engine.grammar import source, words
from engine.grammar.checker import LENGTH_BYTES, Question, Verdict
from engine.grammar.vocabulary import Vocabulary
from engine.lifecycle import die_with_starter, leave_stopping_to_parent
from engine.limits import MAX_COMPILE_BYTES
from engine.structured_output import StructuredOutput

STACK_BYTES = 2 << 20
"""A quarter of what the engine core's main thread has, where masks are made, and much less than its
compiling threads have (`compiler`)."""


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def main() -> None:
    """Answer until there will be no more. Standard input's end is the leash: the engine core has
    ended."""
    leave_stopping_to_parent()
    die_with_starter()
    with contextlib.suppress(ValueError):  # there is a lower limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_COMPILE_BYTES, MAX_COMPILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = Vocabulary([bytes([byte]) for byte in range(256)], [], 256).ll
    decode = msgspec.msgpack.Decoder(Question).decode
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _write(answers, Verdict(None))  # ready
    while length := questions.read(LENGTH_BYTES):
        question = decode(questions.read(int.from_bytes(length, "little")))
        signal.setitimer(signal.ITIMER_PROF, question.cpu_s)
        verdict = _in_small_stack(tokenizer, question.output)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(answers, verdict)


def _write(file: Any, verdict: Verdict) -> None:
    body = msgspec.msgpack.encode(verdict)
    file.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    file.flush()


def _in_small_stack(tokenizer: LLTokenizer, output: StructuredOutput) -> Verdict:
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(_compile(tokenizer, output)))
    thread.start()
    thread.join()
    return verdicts[0] if verdicts else Verdict("it cannot be compiled")


def _compile(tokenizer: LLTokenizer, output: StructuredOutput) -> Verdict:
    try:
        grammar = source.grammar_of(output)
        before = _allocated()
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=source.limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return Verdict(words.reason(output, matcher.get_error()))
        return Verdict(None, max(0, _allocated() - before))
    except ValueError as error:
        return Verdict(words.reason(output, str(error)))
    except MemoryError:
        return Verdict("it takes too much memory")


def _allocated() -> int:
    """Bytes in use, as the C library counts them; the engine core makes it use one arena."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pages = int(open("/proc/self/statm").read().split()[1])  # noqa: SIM115
        return pages * os.sysconf("SC_PAGE_SIZE")
    library.mallinfo2.restype = _MallocInfo
    info = library.mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


if __name__ == "__main__":
    main()
