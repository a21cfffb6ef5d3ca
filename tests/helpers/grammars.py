"""Compilers of structured output over tokenizers of bytes, and requests that have been through
one."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from cluster.scripted_source import scripted_folder
from engine.core import EngineCore
from engine.grammar.checker import Checker
from engine.grammar.compiler import Compiler
from engine.grammar.matcher import Matcher, Words
from engine.request import Request, from_wire
from engine.structured_output import Kind, StructuredOutput
from engine.wire import EngineCoreRequest
from tests.helpers.engine_core import make_request

END = 257
VOCAB_SIZE = 260
"""Of `raywire serve scripted`: a token is a byte, and a few are special."""


@functools.cache
def checker() -> Checker:
    """One process for all tests; it ends with this one."""
    return Checker(cpu_s=30.0)


def make_compiler(folder: Path, vocab_size: int = VOCAB_SIZE, **settings: Any) -> Compiler:
    return Compiler(scripted_folder(folder, {"kind": "echo"}), vocab_size, **settings)


def schema(value: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(value))


def spec(kind: Kind, text: str) -> StructuredOutput:
    return StructuredOutput(kind, text)


def request_of(
    language: StructuredOutput | None, text: str = "", **sampling: Any
) -> EngineCoreRequest:
    """A request whose prompt is text."""
    return make_request(
        sampling.pop("request_id", "r"),
        list(text.encode() or b"?"),
        vocab_size=VOCAB_SIZE,
        **{"structured_output": language, "eos_token_ids": (END,), **sampling},
    )


def started(compiler: Compiler, message: EngineCoreRequest) -> Request:
    """The scheduler's request, with its matcher, without an engine core."""
    request = from_wire(message, max_model_len=4096, block_size=16, is_cached=False)
    assert request.sampling_params.structured_output is not None
    compiler.compile(request.sampling_params.structured_output, checker()).start(request)
    return request


def matcher_of(compiler: Compiler, language: StructuredOutput, **sampling: Any) -> Matcher:
    matcher = started(compiler, request_of(language, **sampling)).matcher
    assert matcher is not None
    return matcher


def add_structured(core: EngineCore, compiler: Compiler, message: EngineCoreRequest) -> None:
    """Prepare, compile and add, as input thread and station do."""
    request = core.prepare(message)
    if (output := request.sampling_params.structured_output) is not None:
        compiler.compile(output, checker()).start(request)
    core.add(request)


def possible(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Which tokens may come next."""
    words: Words = np.empty(-(-vocab_size // 32), np.uint32)
    assert matcher.fill(words), matcher.fault
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found
