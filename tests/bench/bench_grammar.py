"""Structured output on a real vocabulary: loading, compiling, masks, and what they cost a step.

    python -m tests.bench.bench_grammar MODEL_FOLDER [--xgrammar PYTHON]

Times are the processor's, so that a machine that does other things beside it changes little.
Ours is measured through `engine.grammar`, as the engine core uses it. `--xgrammar` names an
interpreter that has xgrammar (and transformers) beside it, for the same on the same machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import tokenizers
import torch

from engine.grammar import vocabulary
from engine.grammar.checker import Checker
from engine.grammar.compiler import Compiler
from engine.lifecycle import freeze_heap
from engine.request import from_wire
from engine.structured_output import StructuredOutput
from tests.helpers.built_kernels import backend
from tests.helpers.engine_core import make_request
from workers import token_masks

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "mail": {"type": "string", "pattern": "^[a-z0-9.]{1,20}@[a-z]{2,12}\\.(com|org)$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["new", "old", "blue"]}, "maxItems": 5},
    },
    "required": ["name", "mail", "age", "address", "tags"],
    "additionalProperties": False,
}
TEXT = json.dumps(
    {
        "name": "María José Carreño Quiñones",
        "mail": "maria.jose@example.com",
        "age": 41,
        "address": {"street": "Calle Gran Vía 12, 3º izquierda", "zip": "28013"},
        "tags": ["new", "blue"],
    },
    ensure_ascii=False,
)
XGRAMMAR = """
import json, sys, time, psutil, statistics
from transformers import PreTrainedTokenizerFast
import xgrammar
folder, schema, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
own, began = psutil.Process(), time.process_time()
before = own.memory_info().rss
tokenizer = PreTrainedTokenizerFast(tokenizer_file=folder + "/tokenizer.json")
info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=int(sys.argv[4]))
compiler = xgrammar.GrammarCompiler(info)
load_s = time.process_time() - began
rss = own.memory_info().rss - before
began = time.process_time()
compiled = compiler.compile_json_schema(schema)
compile_s = time.process_time() - began
matcher = xgrammar.GrammarMatcher(compiled)
mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
fills = []
for token in ids:
    began = time.process_time()
    matcher.fill_next_token_bitmask(mask)
    fills.append(time.process_time() - began)
    assert matcher.accept_token(token)
print(json.dumps([load_s, rss / 2**20, compile_s, statistics.median(fills), max(fills)]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--xgrammar", metavar="PYTHON")
    options = parser.parse_args()
    vocab_size = json.loads((options.folder / "config.json").read_text())["vocab_size"]
    _measure_vocabulary(options.folder, vocab_size)
    ids = tokenizers.Tokenizer.from_file(str(options.folder / "tokenizer.json")).encode(
        TEXT, add_special_tokens=False
    )
    _measure_ours(options.folder, vocab_size, ids.ids)
    if options.xgrammar:
        _measure_xgrammar(options.xgrammar, options.folder, vocab_size, ids.ids)


def _measure_vocabulary(folder: Path, vocab_size: int) -> None:
    # The first of all: later there is memory to be had that others have left.
    own = psutil.Process()
    began, before = time.process_time(), own.memory_info().rss
    loaded = vocabulary.load(folder, vocab_size)
    _say("vocabulary loaded s", time.process_time() - began)
    freeze_heap()
    _say("  and MiB", (own.memory_info().rss - before) / 2**20)
    assert loaded.vocab_size == vocab_size


def _measure_ours(folder: Path, vocab_size: int, ids: list[int]) -> None:
    checker, compiler = Checker(cpu_s=30.0), Compiler(folder, vocab_size)
    output = StructuredOutput("json_schema", json.dumps(SCHEMA))
    _say("checking process started ms, on the clock", 1e3 * _clock(lambda: checker.check(output)))
    _say("checked there ms, on the clock", 1e3 * _clock(lambda: checker.check(output)))
    compiler._load_vocabulary()
    _say("compiled ms", 1e3 * _time(lambda: compiler.compile(output, checker)))
    _say("  and KiB", compiler.num_cached_bytes / 1024)
    for name in ("first", "second"):
        _measure_masks(name, compiler, output, checker, ids)
    checker.close()
    _measure_apply(vocab_size)


def _measure_masks(
    name: str, compiler: Compiler, output: StructuredOutput, checker: Checker, ids: list[int]
) -> None:
    message = make_request("r", [1], structured_output=output)
    request = from_wire(message, max_model_len=9999, block_size=16, is_cached=False)
    grammar = compiler.compile(output, checker)
    _say(f"{name} request started ms", 1e3 * _time(lambda: grammar.start(request)))
    matcher = request.matcher
    assert matcher is not None
    words = np.empty(matcher._num_words, np.uint32)
    fills, accepts = [], []
    for token_id in ids:
        fills.append(_time(lambda: matcher.fill(words)))
        began = time.process_time()
        assert matcher.accept(token_id), matcher.fault
        accepts.append(time.process_time() - began)
    assert matcher.is_over
    _say(f"  its masks, median ms ({len(ids)} tokens)", 1e3 * statistics.median(fills))
    _say("  its masks, longest ms", 1e3 * max(fills))
    _say("  a token accepted, median ms", 1e3 * statistics.median(accepts))


def _measure_apply(vocab_size: int) -> None:
    random = np.random.default_rng(0)
    logits = torch.randn(8, vocab_size)
    few = np.zeros((8, -(-vocab_size // 32)), "<u4")
    few[:, ::500] = 0xFF
    noise = random.integers(0, 2**32, few.shape, "<u4")
    for name, bits in (("few allowed", few), ("most allowed", ~few), ("half of them", noise)):
        _measure_rows(f"masks laid over 1 row, {name} ms", logits, bits[:1])
        _measure_rows(f"masks laid over 8 rows, {name} ms", logits, bits)
    _say("  1 row with torch ms", 1e3 * _best(lambda: token_masks.apply(logits, [0], noise[:1])))


def _measure_rows(what: str, logits: torch.Tensor, bits: token_masks.Bits) -> None:
    kernels, rows = backend().kernels, list(range(len(bits)))
    _say(what, 1e3 * _best(lambda: token_masks.apply(logits, rows, bits, kernels)))


def _measure_xgrammar(python: str, folder: Path, vocab_size: int, ids: list[int]) -> None:
    arguments = [str(folder), json.dumps(SCHEMA), json.dumps(ids), str(vocab_size)]
    done = subprocess.run(
        [python, "-c", XGRAMMAR, *arguments], check=True, capture_output=True, text=True
    )
    load_s, mib, compile_s, median, longest = json.loads(done.stdout.splitlines()[-1])
    _say("xgrammar: vocabulary loaded s", load_s)
    _say("  and MiB", mib)
    _say("  compiled ms", 1e3 * compile_s)
    _say("  its masks, median ms", 1e3 * median)
    _say("  its masks, longest ms", 1e3 * longest)


def _time(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def _clock(function: Callable[[], object]) -> float:
    """What happens in another process."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _best(function: Callable[[], object], repeats: int = 50) -> float:
    return min(_time(function) for _ in range(repeats))


def _say(what: str, value: float) -> None:
    sys.stdout.write(f"{what:48} {value:10.3f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
