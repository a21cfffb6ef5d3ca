"""Structured output through an engine core and a real worker: planned ahead or not, in chunks,
preempted, beside others.

The scripted model echoes its prompt, far ahead of all other tokens; those have a noise of their
own, the same for all rows. So where a language allows what the prompt says, the output is that.
"""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, SchedulerConfig
from engine.core import EngineCore
from engine.grammar.compiler import Compiler
from engine.wire import EngineCoreRequest, FinishReason
from tests.helpers.engine_core import CoreUnderTest, Received, make_request
from tests.helpers.grammars import (
    END,
    VOCAB_SIZE,
    add_structured,
    make_compiler,
    request_of,
    schema,
    spec,
)
from tests.helpers.in_process_worker import InProcessWorker
from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.worker_settings import worker_config

OBJECT = schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)
SAID = '{"name": "Zoë", "ok": true}'


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return make_compiler(tmp_path_factory.mktemp("model"))


class Engine:
    """An engine core over one real worker of the scripted model."""

    def __init__(
        self,
        folder: Path,
        compiler: Compiler,
        *,
        ahead: bool,
        num_blocks: int = 130,
        budget: int = 64,
        max_model_len: int = 500,
    ) -> None:
        config = worker_config(make_scripted_model(folder, kind="echo"))
        config = dataclasses.replace(
            config,
            cache=CacheConfig(block_size=4, num_gpu_blocks_override=num_blocks),
            scheduler=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=budget, async_scheduling=ahead
            ),
            model=dataclasses.replace(config.model, max_model_len=max_model_len),
        )
        self.worker = InProcessWorker(config)
        self.engine = CoreUnderTest(config, self.worker)
        self._compiler = compiler

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    def add(self, *messages: EngineCoreRequest) -> None:
        for message in messages:
            add_structured(self.core, self._compiler, message)

    def run(self, *messages: EngineCoreRequest) -> dict[str, Received]:
        self.add(*messages)
        self.engine.run()
        assert self.core.stats().kv_cache_usage == 0
        return self.engine.received


@pytest.fixture(params=[False, True], ids=["waiting", "ahead"])
def make_engine(
    request: pytest.FixtureRequest, tmp_path: Path, compiler: Compiler
) -> Callable[..., Engine]:
    def make(**settings: Any) -> Engine:
        return Engine(tmp_path, compiler, ahead=request.param, **settings)

    return make


def text_of(received: Received) -> str:
    return bytes(token for token in received.token_ids if token < 256).decode()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Also where a test before has turned on all of the log."""
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_model_that_says_what_is_wanted_is_left_alone(make_engine: Callable[..., Engine]) -> None:
    """And its output ends with the language, whether or not the model wants to go on."""
    engine = make_engine()
    received = engine.run(request_of(OBJECT, SAID + " and more", temperature=0.0))["r"]
    assert text_of(received) == SAID
    assert received.finish_reasons == [FinishReason.STOP]
    assert received.outputs[-1].stop_reason is None


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 2.0, "seed": 7}])
def test_a_model_that_says_something_else_cannot(
    make_engine: Callable[..., Engine], sampling: dict[str, Any]
) -> None:
    """All that comes is of the language."""
    engine = make_engine()
    received = engine.run(request_of(OBJECT, "Certainly! Here is it", **sampling))["r"]
    value = json.loads(text_of(received))
    assert set(value) == {"name", "ok"}
    assert isinstance(value["name"], str)
    assert received.finish_reasons == [FinishReason.STOP]


def test_a_language_that_may_end_ends_with_the_model(make_engine: Callable[..., Engine]) -> None:
    """The model's own end is possible wherever the language's is, and nowhere else."""
    engine = make_engine()
    received = engine.run(request_of(spec("regex", "(ab)+"), "abab", temperature=0.0))["r"]
    assert received.token_ids == [*b"abab", END]
    assert received.finish_reasons == [FinishReason.STOP]


def test_a_finished_language_ends_a_request_that_ignores_ends(
    make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """F07: nothing is asked of a language that is over, planned ahead or not."""
    engine = make_engine()
    output = schema({"enum": ["a"]})
    received = engine.run(
        request_of(output, '"a"', temperature=0.0, ignore_eos=True, max_tokens=10),
        request_of(output, "b", request_id="least", min_tokens=8, max_tokens=10),
    )
    assert text_of(received["r"]) == text_of(received["least"]) == '"a"'
    assert received["r"].finish_reasons == received["least"].finish_reasons == [FinishReason.STOP]
    assert not warnings_in(caplog)


def test_a_length_ends_an_output_in_the_middle(make_engine: Callable[..., Engine]) -> None:
    """What there is so far is the beginning of something valid."""
    engine = make_engine()
    received = engine.run(request_of(OBJECT, SAID, temperature=0.0, max_tokens=9))["r"]
    assert text_of(received) == SAID[:9]
    assert received.finish_reasons == [FinishReason.LENGTH]


def test_everything_else_that_a_request_may_want_goes_with_it(
    make_engine: Callable[..., Engine],
) -> None:
    """Whatever it is, the output is of the language; steps without such requests await nothing."""
    wishes: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"min_tokens": 6, "ignore_eos": True},
        {"logit_bias": {ord("{"): -100.0, ord("}"): -100.0}},
        {"allowed_token_ids": (1, 2, 3)},
        {"allowed_token_ids": tuple(b'{"name":Zo, k}')},
        {"stop_token_ids": (ord("}"),)},
        {"repetition_penalty": 9.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"top_k": 1},
        {"top_p": 0.1, "seed": 3},
        {"min_p": 0.5, "seed": 4},
        {"prompt_logprobs": 1},
        {"repetition_penalty": 0.01, "seed": 5},
    ]
    engine = make_engine()
    engine.add(
        *(request_of(OBJECT, SAID, request_id=str(i), **wish) for i, wish in enumerate(wishes))
    )
    engine.engine.run()
    for i, _ in enumerate(wishes):
        received = engine.engine.received[str(i)]
        assert set(json.loads(text_of(received))) == {"name", "ok"}, i
        assert received.finish_reasons == [FinishReason.STOP], i
    num_plans = len(engine.worker.plans)
    engine.run(make_request("plain", [5, 6], vocab_size=VOCAB_SIZE, max_tokens=3))
    assert not any(plan.awaits_masks for plan in engine.worker.plans[num_plans:])


def test_logprobs_are_the_models_own(make_engine: Callable[..., Engine]) -> None:
    """They show what it would rather have said."""
    engine = make_engine()
    received = engine.run(request_of(spec("choice", '["b"]'), "a", logprobs=1, temperature=0.0))
    (logprobs,) = received["r"].new_logprobs
    assert logprobs.token_ids.tolist() == [[ord("b"), ord("a")]]
    assert logprobs.ranks[0] > 1


def test_chunks_preemption_and_shared_prefixes_change_nothing(
    make_engine: Callable[..., Engine],
) -> None:
    """Each gets what it gets alone, with a cache that is too small and beside plain requests."""
    texts = [json.dumps({"name": f"n{i}" * 3, "ok": i % 2 == 0}) for i in range(8)]

    def requests() -> list[EngineCoreRequest]:
        return [
            request_of(
                OBJECT if i % 4 else None,
                text + "!" * 20,
                request_id=str(i),
                temperature=1.0,
                seed=i,
                max_tokens=40,
            )
            for i, text in enumerate(texts)
        ]

    calm = make_engine(max_model_len=100).run(*requests())
    crowded = make_engine(num_blocks=27, max_model_len=100, budget=11)
    received = crowded.run(*requests())
    assert crowded.core.stats().num_preemptions
    for i, text in enumerate(texts):
        name = str(i)
        assert received[name].token_ids == calm[name].token_ids
        assert (
            text_of(received[name]) == text if i % 4 else text_of(received[name]).startswith(text)
        )


def test_generation_goes_on_after_output_that_is_there(make_engine: Callable[..., Engine]) -> None:
    """The language is followed from its beginning, the tokens are not sent again."""
    engine = make_engine()
    begun = list(SAID.encode()[:12])
    received = engine.run(request_of(OBJECT, SAID, temperature=0.0, output=begun))["r"]
    assert bytes(received.token_ids).decode() == SAID.encode()[12:].decode()


def test_an_abort_in_the_middle_of_a_step_hurts_nobody(make_engine: Callable[..., Engine]) -> None:
    """Its row gets no mask, and the others theirs."""
    engine = make_engine()
    engine.add(
        request_of(OBJECT, SAID, request_id="gone", temperature=0.0),
        request_of(OBJECT, SAID, request_id="stays", temperature=0.0),
    )
    for _ in range(5):
        engine.engine.step()
    engine.engine.step(lambda: engine.core.abort(["gone"]))
    engine.engine.run()
    received = engine.engine.received
    assert received["gone"].finish_reasons == [FinishReason.ABORT]
    assert text_of(received["stays"]) == SAID


def test_a_token_that_cannot_be_ends_its_request_and_no_other(
    make_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of ours, here of masks that are lost: one line, one error, and all else goes on."""
    engine = make_engine()

    class Forgetful(InProcessWorker):
        def sample(self, masks: Any) -> None:
            keep = [i for i, name in enumerate(masks.request_ids) if name != "hit"]
            super().sample(
                type(masks)(masks.step, [masks.request_ids[i] for i in keep], masks.bits[keep])
            )

    engine.worker.__class__ = Forgetful
    received = engine.run(
        request_of(OBJECT, "no", request_id="hit", temperature=0.0),
        request_of(OBJECT, SAID, request_id="stays", temperature=0.0),
    )
    assert received["hit"].finish_reasons == [FinishReason.ERROR]
    assert received["hit"].token_ids == []
    details = received["hit"].outputs[-1].details
    assert details is not None
    assert details.error == "token 110 does not fit the structured output"
    assert details.error_code is None
    assert text_of(received["stays"]) == SAID
    assert warnings_in(caplog) == [f"request_id=hit failed: {details.error}"]


def test_a_plan_says_that_masks_follow_only_where_they_do(
    make_engine: Callable[..., Engine],
) -> None:
    """A chunk that samples nothing awaits nothing."""
    engine = make_engine(budget=10)
    engine.run(request_of(OBJECT, SAID, temperature=0.0))
    plans = engine.worker.plans
    assert [plan.awaits_masks for plan in plans[:3]] == [False, False, True]
    assert set(engine.worker.masks) == {plan.step for plan in plans if plan.awaits_masks}
