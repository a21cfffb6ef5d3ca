"""`--only int8`: our int8 weights against our own bf16, in turns, and what they cost in perplexity.

Perplexity is that of English prose that every Python has: its manual's chapters on the language.
"""

import math
import pydoc_data.topics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from cluster.bench.machine import Load
from tests.bench import limits
from tests.bench.engines import Engine
from tests.bench.figures import Figure, Recorder
from tests.bench.model_section import GREEDY, PREFILLS, Case, ModelSettings, Turns, llm_options
from tests.bench.obedient import Obedient

_NUM_WINDOWS = 24
_WINDOW = 128
"""Tokens of each stretch of text."""


def measure_int8(
    ours: Engine, settings: ModelSettings, say: Callable[[str], None]
) -> dict[str, Figure]:
    """All rows of int8."""
    machine = limits.measure(ours.environ)
    plain, int8 = replace(ours, name="bf16"), ours  # bf16 is what int8 is compared with
    recorder = Recorder()
    windows = text_windows(settings)
    with ExitStack() as stack:
        children: dict[Engine, Obedient] = {}
        for engine in (int8, plain):
            options = llm_options()
            if engine is int8:
                options["quantization"] = "int8"
            arguments = {"engine": "raywire", "model": str(settings.folder), "options": options}
            children[engine] = stack.enter_context(
                engine.commands("llm_commands.py", arguments, settings.logs, f"-{len(children)}")
            )
        run = Turns(children, settings, recorder, say)
        run.decode(Case("int8-decode-1", 1, GREEDY))
        for length in PREFILLS:
            run.prefill(f"int8-prefill-{length}", length)
        for engine, child in children.items():
            log_likelihood = child.ask("score", prompts=windows)
            perplexity = math.exp(-log_likelihood / sum(len(ids) - 1 for ids in windows))
            say(f"perplexity, {engine.name}: {perplexity:.3f}")
            # Whatever others do meanwhile changes nothing about it.
            recorder.add(engine.side, {"int8-perplexity": perplexity}, Load(wall_s=1.0))
    work = limits.model_work(settings.folder)
    recorder.limit("int8-decode-1", work.decode_ms(machine, 1, bytes_per_param=1))
    return recorder.figures()


def text_windows(settings: ModelSettings) -> list[list[int]]:
    """Token ids of text, the beginning mark first where the model has one."""
    from api.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(settings.folder)
    ids = tokenizer.encode("\n".join(pydoc_data.topics.topics.values()))
    first, rest = ids[0], ids[1:]
    return [
        [first, *rest[i * (_WINDOW - 1) : (i + 1) * (_WINDOW - 1)]] for i in range(_NUM_WINDOWS)
    ]
