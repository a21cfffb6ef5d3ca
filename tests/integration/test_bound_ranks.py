"""Structured output over real rings and several ranks: only one of them has the logits, and several
steps are under way."""

import dataclasses
import json
from pathlib import Path

import pytest

from engine.config import CacheConfig, ExecutorConfig, SchedulerConfig
from engine.wire import FinishReason
from tests.helpers.engine_core import CoreUnderTest, make_request
from tests.helpers.grammars import VOCAB_SIZE, add_structured, make_compiler, request_of, schema
from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.worker_settings import worker_config
from workers.executor import start_executor

pytestmark = pytest.mark.slow

ROW = schema({"type": "array", "items": {"enum": ["a", "b", 7]}, "minItems": 3, "maxItems": 5})
TEXTS = ['["a", 7, "b"] and so on', '["b", "b", "b", "b", "b", "b"', "anything but that"]


@pytest.mark.parametrize(("tp", "pp", "ahead"), [(2, 1, False), (1, 3, False), (1, 1, True)])
def test_ranks_give_what_the_language_has(tmp_path: Path, tp: int, pp: int, ahead: bool) -> None:
    """As one rank does, beside requests that are bound to nothing."""
    config = dataclasses.replace(
        worker_config(make_scripted_model(tmp_path, kind="echo"), tp=tp, pp=pp),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=80),
        scheduler=SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=20, async_scheduling=ahead or None
        ),
        # A mask of this vocabulary is small: rings of the least size take it.
        executor=ExecutorConfig(num_threads=1, ring_chunk_bytes=1 << 20),
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=300))
    causes: list[str] = []
    executor = start_executor(config, causes.append)
    engine = CoreUnderTest(config, executor)
    try:
        compiler = make_compiler(tmp_path)
        for i, text in enumerate(TEXTS):
            bound = request_of(ROW, text, request_id=f"bound-{i}", temperature=0.0)
            free = make_request(
                f"free-{i}", list(text.encode()), vocab_size=VOCAB_SIZE, max_tokens=9
            )
            for message in (bound, free):
                add_structured(engine.core, compiler, message)
        engine.run()
    finally:
        engine.core.close()
    texts = {name: bytes(each.token_ids).decode() for name, each in engine.received.items()}
    assert texts["bound-0"] == '["a", 7, "b"'[:13] + "]"
    assert texts["bound-1"] == '["b", "b", "b", "b", "b"]'
    assert 3 <= len(json.loads(texts["bound-2"])) <= 5
    for i in range(len(TEXTS)):
        assert engine.received[f"bound-{i}"].finish_reasons == [FinishReason.STOP]
        assert engine.received[f"free-{i}"].finish_reasons == [FinishReason.LENGTH]
    assert not causes
