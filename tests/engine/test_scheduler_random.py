"""Any load, in any order, over any pool: each request gets exactly its own tokens and one end.

The simulated workers check the KV content of every step from the plans alone
(`tests/helpers/simulated_workers.py`); the core's `validate` checks its books after every step.
"""

from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.kv_cache_manager import KVCacheManager
from engine.request import Request
from engine.wire import EngineCoreRequest, EventKind, FinishReason
from tests.helpers.engine_core import CoreUnderTest, Received, make_config, make_request
from tests.helpers.simulated_workers import right_answer

VOCAB = 5

# Long common beginnings, so that prefixes are found, and short tails, so that they part.
prompts = st.builds(
    lambda length, tail: [*([1, 2, 0, 3] * 4)[:length], *tail],
    st.integers(0, 16),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)


class AnyLoad(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        # 0: one stage, planned ahead.
        stages=st.sampled_from([0, 0, 1, 2, 3]),
        caching=st.booleans(),
        chunked=st.booleans(),
        block_size=st.sampled_from([1, 2, 4]),
        max_model_len=st.integers(24, 36),
        spare_blocks=st.sampled_from([0, 0, 1, 3, 6]),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 40),
        threshold=st.sampled_from([0, 0, 1, 3]),
    )
    def start(
        self,
        policy: str,
        stages: int,
        caching: bool,
        chunked: bool,
        block_size: int,
        max_model_len: int,
        spare_blocks: int,
        max_num_seqs: int,
        budget: int,
        threshold: int,
    ) -> None:
        config = make_config(
            num_blocks=-(-max_model_len // block_size) + spare_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            caching=caching,
            stages=max(1, stages),
            ahead=not stages,
            policy=policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
            long_prefill_token_threshold=threshold,
            enable_chunked_prefill=chunked,
        )
        self.engine = CoreUnderTest(config)
        _check_refusals(self.engine.core._scheduler._kv_cache)
        self.max_model_len = max_model_len
        self.sent: dict[str, EngineCoreRequest] = {}
        self.aborted: set[str] = set()
        self.counters = self._counters()

    @rule(
        copies=st.integers(1, 3),
        prompt=prompts,
        output=st.none() | st.lists(st.integers(0, VOCAB - 1), max_size=2),
        salt=st.sampled_from(["", "", "x"]),
        priority=st.integers(0, 2),
        arrival_time=st.floats(0, 3),
        client_index=st.integers(0, 1),
        max_tokens=st.none() | st.integers(3, 12),
        min_tokens=st.integers(0, 3),
        # Mostly none: long outputs are what makes requests preempt each other.
        stop_token_ids=st.sampled_from([(), (), (), (1,)]),
        eos_token_ids=st.sampled_from([(), (), (), (2,), (3, 4)]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(
        self, copies: int, prompt: list[int], output: list[int] | None, salt: str, **fields: Any
    ) -> None:
        for _ in range(copies):
            request_id = f"{len(self.sent)}@{salt}"
            request = make_request(request_id, prompt, output=output, salt=salt or None, **fields)
            self.sent[request_id] = request
            self.engine.add(request)

    @precondition(lambda self: self.engine.received)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def add_next_turn(self, data: st.DataObject, tail: list[int]) -> None:
        """A prompt that begins with another request and what has come of it, under its salt."""
        before = self.sent[data.draw(st.sampled_from(sorted(self.engine.received)))]
        assert before.prompt_token_ids is not None
        output = [] if before.output_token_ids is None else before.output_token_ids.tolist()
        tokens = self.engine.received[before.request_id].token_ids
        prompt = [*before.prompt_token_ids.tolist(), *output, *tokens, *tail]
        if len(prompt) >= self.max_model_len:
            return
        _, at, salt = before.request_id.partition("@")
        request_id = f"{len(self.sent)}{at}{salt}"
        request = make_request(request_id, prompt, salt=salt or None, max_tokens=6)
        self.sent[request_id] = request
        self.engine.add(request)

    @precondition(lambda self: self.engine.core.has_work())
    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.core.has_work():
                self.engine.step()
                self._check_counters()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), is_mid_step=st.booleans())
    def abort(self, data: st.DataObject, is_mid_step: bool) -> None:
        """Also of requests that have ended, and after the forward pass of a step."""
        ids = data.draw(st.lists(st.sampled_from(sorted(self.sent)), max_size=3))
        self.aborted.update(ids)
        if is_mid_step and self.engine.core.has_work():
            self.engine.step(lambda: self.engine.core.abort(ids))
        else:
            self.engine.core.abort(ids)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def take_an_id_again(self, data: st.DataObject) -> None:
        """Only a request that has ended gives its id away."""
        request_id = data.draw(st.sampled_from(sorted(self.sent)))
        received = self.engine.received.get(request_id, Received())
        if request_id not in self.aborted and not received.finish_reasons:
            self.engine.add(make_request(request_id, [4, 4, 4], client_index=1))

    @rule()
    def reset(self) -> None:
        self.engine.core.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        self._check_counters()
        assert set(self.engine.received) == set(self.sent)
        for request_id, request in self.sent.items():
            self._check_request(request, self.engine.received[request_id])
        stats = self.engine.core.stats()
        assert (stats.num_waiting, stats.num_running, stats.kv_cache_usage) == (0, 0, 0.0)
        assert self.engine.core.reset_prefix_cache()

    def _check_request(self, request: EngineCoreRequest, received: Received) -> None:
        assert received.clients == {request.client_index}
        (reason,) = received.finish_reasons
        assert received.outputs[-1].finish_reason is reason
        tokens, right_reason = self._right_answer(request)
        if reason is FinishReason.ABORT:
            assert request.request_id in self.aborted
            assert received.token_ids == tokens[: len(received.token_ids)]
        else:
            assert (received.token_ids, reason) == (tokens, right_reason)
        _check_events(received)
        _check_what_is_sent_once(request, received)

    def _right_answer(self, request: EngineCoreRequest) -> tuple[list[int], FinishReason]:
        assert request.prompt_token_ids is not None
        assert request.sampling_params is not None
        output = request.output_token_ids
        return right_answer(
            request.request_id,
            request.prompt_token_ids.tolist(),
            request.sampling_params,
            vocab_size=VOCAB,
            max_model_len=self.max_model_len,
            output=[] if output is None else output.tolist(),
        )

    def _counters(self) -> list[int]:
        stats = self.engine.core.stats()
        return [
            stats.num_steps,
            stats.num_preemptions,
            stats.prefix_cache_queries,
            stats.prefix_cache_hits,
            stats.num_prompt_tokens,
            stats.num_generation_tokens,
        ]

    def _check_counters(self) -> None:
        before, self.counters = self.counters, self._counters()
        assert all(old <= new for old, new in zip(before, self.counters, strict=True))


def _check_refusals(kv_cache: KVCacheManager) -> None:
    """Whoever is refused without a look would be refused after it as well."""

    def still_refuses(request: Request, reserved: int) -> bool:
        refuses = KVCacheManager.still_refuses(kv_cache, request, reserved)
        cached = kv_cache.find_cached(request)
        assert not refuses or kv_cache._num_lacking(request, cached, reserved) > 0
        return refuses

    kv_cache.still_refuses = still_refuses  # type: ignore[method-assign]


def _check_events(received: Received) -> None:
    """QUEUED, then SCHEDULED and PREEMPTED in turns, in the order of time."""
    first, *rest = received.events
    assert first is EventKind.QUEUED
    assert rest[::2] == [EventKind.SCHEDULED] * len(rest[::2])
    assert rest[1::2] == [EventKind.PREEMPTED] * len(rest[1::2])
    assert received.times == sorted(received.times)


def _check_what_is_sent_once(request: EngineCoreRequest, received: Received) -> None:
    """With the first token: how much of the prompt was cached, and its log probabilities."""
    assert request.prompt_token_ids is not None
    assert request.sampling_params is not None
    prompt = request.prompt_token_ids.tolist()
    assert len(received.prefill_stats) == bool(received.token_ids)
    if received.token_ids:
        assert received.prefill_stats[0].num_prompt_tokens == len(prompt)
        # With tokens from elsewhere the last one is theirs, and the whole prompt may be cached.
        num_other = 0 if request.output_token_ids is None else request.output_token_ids.size
        assert received.num_cached_tokens <= len(prompt) - (num_other == 0)
    if request.sampling_params.prompt_logprobs is None:
        assert not received.prompt_logprobs
    elif received.token_ids and len(prompt) > 1:
        (logprobs,) = received.prompt_logprobs
        assert logprobs.token_ids[:, 0].tolist() == prompt[1:]
        assert received.num_cached_tokens == 0


AnyLoad.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    # Shrinking takes minutes: add Phase.shrink to look for the smallest failing load.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_any_load = AnyLoad.TestCase
