"""Who runs, how much of it, and who gives way. Over simulated workers, which check each plan."""

import re

import numpy as np
import pytest

from engine.kv_cache_manager import KVCacheManager
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.step import NO_TOKEN, ModelRunnerOutput
from engine.wire import EventKind, FinishReason
from tests.helpers.engine_core import CoreUnderTest, make_config, make_request
from tests.helpers.simulated_workers import right_answer


def make(**settings: object) -> CoreUnderTest:
    return CoreUnderTest(make_config(**settings))  # type: ignore[arg-type]


# ----------------------------------------------------------------------------- the token budget


def test_running_requests_come_before_waiting_ones() -> None:
    """Decodes take their tokens first; what is left of the budget starts new prompts."""
    engine = make(max_num_batched_tokens=10, max_num_seqs=4)
    engine.add(make_request("old", 4))
    engine.step()
    engine.add(make_request("new", 20))
    engine.step()
    assert engine.scheduled() == {"old": 1, "new": 9}


def test_a_long_prompt_is_computed_in_chunks() -> None:
    """Each step takes what the budget leaves; the last one samples."""
    engine = make(max_num_batched_tokens=10, max_num_seqs=4)
    engine.add(make_request("r", 24, max_tokens=1))
    engine.run()
    assert [plan.num_scheduled_tokens for plan in engine.workers.plans] == [
        {"r": 10},
        {"r": 10},
        {"r": 4},
    ]
    assert len(engine.received["r"].token_ids) == 1


def test_a_threshold_keeps_long_prompts_from_taking_the_whole_budget() -> None:
    """At most so many prompt tokens of one request, so that short ones get in beside it."""
    engine = make(max_num_batched_tokens=16, max_num_seqs=4, long_prefill_token_threshold=6)
    engine.add(make_request("long", 30), make_request("short", [4] * 5))
    engine.step()
    assert engine.scheduled() == {"long": 6, "short": 5}


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    """And nobody overtakes it, or it could wait for ever."""
    engine = make(
        max_model_len=20, max_num_batched_tokens=20, max_num_seqs=4, enable_chunked_prefill=False
    )
    engine.add(make_request("a", [1] * 12, max_tokens=3))
    engine.add(make_request("b", [2] * 12, max_tokens=2), make_request("c", [3], max_tokens=2))
    engine.step()
    assert engine.scheduled() == {"a": 12}
    engine.run()
    assert all(received.finish_reasons for received in engine.received.values())


def test_no_more_requests_run_than_there_are_seats() -> None:
    """`max_num_seqs` counts those that run, also between their steps."""
    engine = make(max_num_seqs=2)
    engine.add(*(make_request(str(n), 4, max_tokens=n + 1) for n in range(3)))
    engine.step()
    assert list(engine.scheduled()) == ["0", "1"]
    engine.step()  # the first has ended
    assert list(engine.scheduled()) == ["1", "2"]


# ------------------------------------------------------------------------------------- policies


def test_fcfs_runs_by_arrival_and_priority_by_priority() -> None:
    """Lower runs first, then the earlier; under fcfs neither field counts."""
    for policy, order in (("fcfs", ["a", "b", "c", "d"]), ("priority", ["d", "c", "b", "a"])):
        engine = make(policy=policy, max_num_seqs=1)
        engine.add(
            make_request("a", priority=2, arrival_time=1.0, max_tokens=1),
            make_request("b", priority=1, arrival_time=9.0, max_tokens=1),
            make_request("c", priority=1, arrival_time=3.0, max_tokens=1),
            make_request("d", priority=-5, arrival_time=9.0, max_tokens=1),
        )
        engine.run()
        assert [next(iter(plan.num_scheduled_tokens)) for plan in engine.workers.plans] == order


def test_an_urgent_request_comes_first_among_the_running() -> None:
    """Under priority it is scheduled before those that ran already, and preempted after them."""
    engine = make(policy="priority", max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(make_request("lazy", 4, priority=5))
    engine.step()
    engine.add(make_request("urgent", 20, priority=0))
    engine.step()
    assert engine.scheduled() == {"lazy": 1, "urgent": 7}
    engine.step()
    assert engine.scheduled() == {"urgent": 8}


# ----------------------------------------------------------------------------------- preemption


def test_the_newest_is_preempted_and_resumed_whole() -> None:
    """The victim joins again with all its tokens, and gets the right ones all the same."""
    engine = make(num_blocks=5, block_size=4, max_model_len=16, caching=False)
    old, new = make_request("old", 7, max_tokens=9), make_request("new", 7, max_tokens=9)
    engine.add(old, new)
    while engine.core.stats().num_preemptions == 0:
        engine.step()
    plan = engine.workers.plans[-1]
    assert plan.dropped_request_ids == ["new"]
    assert list(plan.num_scheduled_tokens) == ["old"]
    num_tokens = 7 + len(engine.received["new"].token_ids)
    engine.run()
    resumed = [plan.new_requests for plan in engine.workers.plans if plan.new_requests][-1]
    assert [(r.request_id, len(r.token_ids), r.num_prompt_tokens) for r in resumed] == [
        ("new", num_tokens, 7)
    ]
    for request in (old, new):
        assert request.prompt_token_ids is not None
        assert request.sampling_params is not None
        tokens, reason = right_answer(
            request.request_id,
            request.prompt_token_ids.tolist(),
            request.sampling_params,
            vocab_size=5,
            max_model_len=16,
        )
        assert engine.received[request.request_id].token_ids == tokens
        assert engine.received[request.request_id].finish_reasons == [reason]


def test_a_preempted_request_is_resumed_before_newer_ones_start() -> None:
    """It goes back to the front of the queue; no new request starts in the step that preempts."""
    engine = make(num_blocks=5, block_size=4, max_model_len=16, caching=False)
    engine.add(make_request("a", 7, max_tokens=9), make_request("b", 7, max_tokens=9))
    engine.step()
    engine.add(make_request("c", 8, max_tokens=1))
    while engine.core.stats().num_preemptions == 0:
        engine.step()
    assert not engine.workers.plans[-1].new_requests
    engine.run()
    joined = [r.request_id for plan in engine.workers.plans for r in plan.new_requests]
    assert joined.index("c") > len(joined) - 1 - joined[::-1].index("b")


def test_the_least_urgent_is_preempted_under_priority() -> None:
    """Whoever came first: the victim is the last by (priority, arrival)."""
    engine = make(num_blocks=5, block_size=4, max_model_len=16, caching=False, policy="priority")
    engine.add(
        make_request("lazy", 7, priority=1, arrival_time=0.0, max_tokens=9),
        make_request("urgent", 7, priority=0, arrival_time=5.0, max_tokens=9),
    )
    engine.run()
    assert engine.received["lazy"].events.count(EventKind.PREEMPTED) == 1
    assert engine.received["urgent"].events.count(EventKind.PREEMPTED) == 0


def test_nothing_starts_in_a_step_that_preempts() -> None:
    """Not even what comes before the victim and would fit: the blocks were just too few."""
    engine = make(num_blocks=6, block_size=4, max_model_len=24, caching=False, policy="priority")
    engine.add(make_request("urgent", 4, priority=0), make_request("lazy", 15, priority=9))
    engine.step()
    engine.add(make_request("between", 4, priority=5))
    while engine.core.stats().num_preemptions == 0:
        engine.step()
    assert list(engine.scheduled()) == ["urgent"]
    engine.step()
    assert list(engine.scheduled()) == ["urgent", "between"]


def test_a_prompt_is_not_started_when_it_could_not_be_finished() -> None:
    """Blocks that running prompts still need are reserved: two long prompts do not starve each
    other chunk by chunk."""
    engine = make(num_blocks=8, block_size=4, max_model_len=24, long_prefill_token_threshold=4)
    engine.add(make_request("a", [1] * 20, max_tokens=1), make_request("b", [2] * 20, max_tokens=1))
    engine.step()
    assert engine.scheduled() == {"a": 4}
    engine.run()
    assert engine.core.stats().num_preemptions == 0


def test_a_request_is_not_started_on_the_last_block_of_another() -> None:
    """Each running request keeps one free block to grow into, or the new one would be preempted."""
    engine = make(num_blocks=4, block_size=4, caching=False)
    engine.add(make_request("old", 3, max_tokens=3))
    engine.step()
    engine.add(make_request("new", 12, max_tokens=2))
    engine.step()
    assert engine.scheduled() == {"old": 1}
    engine.run()
    assert engine.core.stats().num_preemptions == 0


def test_a_request_that_does_not_fit_is_not_looked_up_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only when blocks have become free, and then it starts at once."""
    engine = make(num_blocks=8, block_size=4)
    engine.add(make_request("old", 16, max_tokens=8))
    engine.step()
    engine.add(make_request("big", [3] * 24, max_tokens=1))
    looked_up: list[str] = []
    find = KVCacheManager.find_cached

    def find_and_note(self: KVCacheManager, request: Request) -> list[int]:
        looked_up.append(request.request_id)
        return find(self, request)

    monkeypatch.setattr(KVCacheManager, "find_cached", find_and_note)
    engine.run()
    assert looked_up == ["big", "big"]
    assert engine.received["big"].finish_reasons == [FinishReason.LENGTH]


# --------------------------------------------------------------------------------- prefix cache


def test_a_prefix_is_computed_once() -> None:
    """A later request takes full blocks from the cache, and computes at least one token."""
    engine = make(block_size=4)
    engine.add(make_request("first", 12, max_tokens=1))
    engine.run()
    engine.add(make_request("same", 12, max_tokens=1), make_request("longer", 14, max_tokens=1))
    engine.run()
    assert engine.scheduled() == {"same": 4, "longer": 2}
    cached = [engine.received[name].num_cached_tokens for name in ("first", "same", "longer")]
    assert cached == [0, 8, 12]
    stats = engine.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (12 + 12 + 14, 20)


def test_requests_of_one_step_share_their_prefix_too() -> None:
    """n = 4 over one prompt computes it once: the blocks are found as soon as they are planned."""
    engine = make(block_size=4)
    engine.add(*(make_request(str(n), 10, max_tokens=1) for n in range(4)))
    engine.step()
    assert engine.scheduled() == {"0": 10, "1": 2, "2": 2, "3": 2}


def test_output_is_cached_as_well() -> None:
    """The next turn of a chat begins with the last answer."""
    engine = make(block_size=4)
    engine.add(make_request("turn 1", 6, max_tokens=7))
    engine.run()
    history = [*range(5), 0, *engine.received["turn 1"].token_ids]
    engine.add(make_request("turn 2", [*history, 1], max_tokens=1))
    engine.run()
    assert engine.received["turn 2"].num_cached_tokens == 12  # the 13th token was never computed


@pytest.mark.row("S-46")
def test_salts_keep_tenants_apart() -> None:
    """An identical prompt under another salt, or none, finds nothing; the same salt does."""
    engine = make(block_size=4)
    for name, salt in (("1@a", "a"), ("2@b", "b"), ("3@", None), ("4@a", "a")):
        engine.add(make_request(name, 12, salt=salt, max_tokens=1))
        engine.run()
    assert [received.num_cached_tokens for received in engine.received.values()] == [0, 0, 0, 8]


def test_switched_off_it_finds_nothing() -> None:
    """And counts no queries."""
    engine = make(block_size=4, caching=False)
    for name in ("1", "2"):
        engine.add(make_request(name, 12, max_tokens=1))
        engine.run()
    assert engine.received["2"].num_cached_tokens == 0
    assert engine.core.stats().prefix_cache_queries == 0


def test_prompt_logprobs_need_the_whole_prompt() -> None:
    """Such a request takes nothing from the cache, and sends them once, all in a row."""
    engine = make(block_size=4, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(make_request("1", 14, max_tokens=2))
    engine.run()
    engine.add(make_request("2", 14, max_tokens=2, prompt_logprobs=0))
    engine.run()
    received = engine.received["2"]
    assert received.num_cached_tokens == 0
    (logprobs,) = received.prompt_logprobs
    assert logprobs.token_ids[:, 0].tolist() == [n % 5 for n in range(1, 14)]
    assert received.outputs[-2].details is not None
    assert received.outputs[-2].details.prompt_logprobs is logprobs  # with the first token


def test_prompt_logprobs_come_once_though_the_prefill_is_preempted() -> None:
    """What was collected before the preemption is thrown away and collected again."""
    engine = make(
        num_blocks=6,
        block_size=4,
        max_model_len=24,
        caching=False,
        policy="priority",
        max_num_batched_tokens=4,
        max_num_seqs=4,
    )
    engine.add(make_request("urgent", 3, priority=0, max_tokens=20))
    engine.step()
    engine.add(make_request("lazy", 12, priority=1, prompt_logprobs=0, max_tokens=2))
    engine.run()
    received = engine.received["lazy"]
    (logprobs,) = received.prompt_logprobs
    assert logprobs.token_ids[:, 0].tolist() == [n % 5 for n in range(1, 12)]


def test_prompt_logprobs_that_were_sent_do_not_cost_the_cache() -> None:
    """Preempted after its first token, such a request takes its blocks back like any other."""
    engine = make(num_blocks=5, block_size=4, max_model_len=16)
    engine.add(make_request("old", [1] * 7, max_tokens=9))
    engine.add(make_request("new", [2] * 7, max_tokens=9, prompt_logprobs=0))
    engine.run()
    joined = [new for plan in engine.workers.plans for new in plan.new_requests]
    assert [new.request_id for new in joined] == ["old", "new", "new"]
    assert joined[-1].num_computed_tokens > 0
    assert joined[-1].sampling_params.prompt_logprobs is None  # nor are they computed again
    stats = engine.core.stats()  # neither of who looks nothing up, nor when a request is resumed
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (7, 0)
    assert len(engine.received["new"].prompt_logprobs) == 1


@pytest.mark.row("S-48")
def test_what_pushes_prefixes_out_is_counted() -> None:
    """One tenant's prompts cost another his cached prefix, whatever their salts: it is computed
    again, with the same answer, and the counter of evictions shows it."""
    engine = make(num_blocks=4, block_size=4, max_model_len=16)
    for turn, hits in (("first", 0), ("again", 8)):
        engine.add(make_request(turn, [1] * 9, max_tokens=1, salt="a"))
        engine.run()
        assert engine.received[turn].num_cached_tokens == hits
    assert engine.core.stats().num_evicted_blocks == 0
    engine.add(make_request("other", [2] * 15, max_tokens=1, salt="b"))
    engine.run()
    assert engine.core.stats().num_evicted_blocks == 2
    engine.add(make_request("late", [1] * 9, max_tokens=1, salt="a"))
    engine.run()
    assert engine.received["late"].num_cached_tokens == 0
    assert engine.received["late"].token_ids == engine.received["first"].token_ids


def test_reset_is_refused_while_blocks_are_held() -> None:
    """False, and everything is still found; when idle it forgets all."""
    engine = make(block_size=4)
    engine.add(make_request("1", 12, max_tokens=2))
    engine.step()
    assert not engine.core.reset_prefix_cache()
    engine.run()
    assert engine.core.reset_prefix_cache()
    engine.add(make_request("2", 12, max_tokens=1))
    engine.run()
    assert engine.received["2"].num_cached_tokens == 0


# ------------------------------------------------------------------------------- continuations


def test_a_continuation_goes_on_exactly_where_it_was() -> None:
    """Tokens from elsewhere are not sent again, count for max_tokens, and the rest is the same."""
    whole = make()
    whole.add(make_request("r", 6, max_tokens=8))
    whole.run()
    tokens = whole.received["r"].token_ids
    rest = make()
    rest.add(make_request("r", 6, output=tokens[:3], max_tokens=8))
    rest.run()
    assert rest.received["r"].token_ids == tokens[3:]
    assert rest.received["r"].finish_reasons == [FinishReason.LENGTH]
    assert rest.workers.plans[0].new_requests[0].num_prompt_tokens == 6


# ------------------------------------------------------------------------------ steps under way


def test_decodes_are_spread_over_the_stages() -> None:
    """With two stages each step takes half of the decodes, so that both stages have work."""
    engine = make(stages=2)
    engine.add(*(make_request(str(n), [n], max_tokens=50) for n in range(4)))
    for _ in range(10):
        engine.step()
    recent = [set(plan.num_scheduled_tokens) for plan in engine.workers.plans[-4:]]
    assert [len(requests) for requests in recent] == [2, 2, 2, 2]
    assert recent[0] | recent[1] == {"0", "1", "2", "3"}
    assert recent[0] == recent[2]


def test_chunks_of_one_prompt_are_under_way_together() -> None:
    """They do not wait for each other's reply, as a sampled token must."""
    engine = make(stages=3, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(make_request("r", 20, max_tokens=2))
    engine.step()
    assert [plan.num_scheduled_tokens for plan in engine.workers.plans] == [
        {"r": 8},
        {"r": 8},
        {"r": 4},
    ]
    engine.run()
    assert len(engine.received["r"].token_ids) == 2


def test_a_token_of_before_the_preemption_is_dropped() -> None:
    """Preempted and resumed while its token was under way, a request gets it once, not twice."""
    engine = make(num_blocks=5, block_size=4, max_model_len=16, stages=3)
    engine.add(make_request("a", 5, max_tokens=11), make_request("b", [9] * 6, max_tokens=3))
    scheduler = engine.core._scheduler
    plans = [scheduler.schedule(0.0)]
    first = plans[0]
    assert first is not None
    scheduler._preempt_last(1.0)  # b, whose first token is under way
    again = scheduler.schedule(2.0)
    assert again is not None
    assert [new.request_id for new in again.new_requests] == ["b"]
    scheduler.update(first, engine.workers.execute(first).result())
    sent = [output for output in scheduler.outbox.take()[0] if output.new_token_ids]
    assert [output.request_id for output in sent] == ["a"]
    scheduler.update(again, engine.workers.execute(again).result())
    sent = [output for output in scheduler.outbox.take()[0] if output.new_token_ids]
    assert [output.request_id for output in sent] == ["b"]


# -------------------------------------------------------------------------------- planned ahead


def test_a_row_after_the_end_is_in_vain() -> None:
    """Who stops has a row in the step that was planned before; it brings nobody anything, and the
    others go on."""
    engine = make(ahead=True)
    stop = right_answer("r", [2], SamplingParams(max_tokens=5), vocab_size=5, max_model_len=99)[0]
    engine.add(make_request("r", [2], stop_token_ids=(stop[0],)))
    engine.add(make_request("other", [2, 2], max_tokens=6))
    engine.step()
    assert engine.received["r"].finish_reasons == [FinishReason.STOP]
    assert list(engine.scheduled()) == ["r", "other"]
    engine.step()
    assert engine.workers.plans[-1].dropped_request_ids == ["r"]
    engine.run()
    assert engine.received["r"].token_ids == stop[:1]
    assert len(engine.received["other"].token_ids) == 6
    assert engine.core.stats().num_generation_tokens == 7


def test_a_block_that_is_filled_ahead_is_found_once_its_token_is_known() -> None:
    """Planned ahead or not, the next turn finds as much of the last one."""
    found = []
    for ahead in (False, True):
        engine = make(ahead=ahead, block_size=2)
        engine.add(make_request("turn 1", 5, max_tokens=7))
        engine.run()
        history = [*range(5), *engine.received["turn 1"].token_ids]
        engine.add(make_request("turn 2", [*history, 1], max_tokens=1))
        engine.run()
        found.append(engine.received["turn 2"].num_cached_tokens)
    assert found == [10, 10]


def test_a_live_request_without_a_token_is_an_error() -> None:
    """Workers leave out who has ended; were they wrong, the stream would go on with nonsense."""
    engine = make()
    engine.add(make_request("r"))
    plan = engine.core._scheduler.schedule(0.0)
    assert plan is not None
    reply = ModelRunnerOutput(1, ["r"], np.full(1, NO_TOKEN, dtype="<u4"))
    with pytest.raises(RuntimeError, match=r"left out <Request r .*>, which has not ended"):
        engine.core._scheduler.update(plan, reply)


# ------------------------------------------------------------------------ events and statistics


def test_events_go_out_with_the_step_they_happened_in() -> None:
    """Also where that step brings no token; their times are the core's own, in order."""
    engine = make(max_num_batched_tokens=8, max_num_seqs=2)
    engine.add(make_request("r", 12, max_tokens=1))
    engine.step()
    (news,) = engine.received["r"].outputs
    assert news.new_token_ids == b""
    assert engine.received["r"].events == [EventKind.QUEUED, EventKind.SCHEDULED]
    engine.run()
    assert engine.received["r"].events == [EventKind.QUEUED, EventKind.SCHEDULED]
    assert engine.received["r"].times == sorted(engine.received["r"].times)


def test_preemption_is_told_at_once_and_resumption_again() -> None:
    """So the time a request was preempted is known, and its queue time stays the first one."""
    engine = make(num_blocks=5, block_size=4, max_model_len=16, caching=False)
    engine.add(make_request("old", 7, max_tokens=9), make_request("new", 7, max_tokens=9))
    while engine.core.stats().num_preemptions == 0:
        engine.step()
    assert engine.received["new"].events[-1] is EventKind.PREEMPTED
    engine.run()
    assert engine.received["new"].events == [
        EventKind.QUEUED,
        EventKind.SCHEDULED,
        EventKind.PREEMPTED,
        EventKind.SCHEDULED,
    ]
    assert len(engine.received["new"].prefill_stats) == 1


def test_counters_count_tokens_once() -> None:
    """A recomputed token is neither a new prompt token nor a new output token."""
    engine = make(num_blocks=5, block_size=4, max_model_len=16, caching=False)
    engine.add(make_request("old", 7, max_tokens=9), make_request("new", 7, max_tokens=9))
    engine.run()
    stats = engine.core.stats()
    assert stats.num_preemptions >= 1
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (14, 18)
    assert stats.num_steps == len(engine.workers.plans)


def test_nothing_is_kept_of_requests_that_ended_between_two_steps() -> None:
    """Added and aborted while no step ran, a thousand times: their prompts would fill memory."""
    engine = make()
    scheduler = engine.core._scheduler
    for _ in range(3):
        engine.add(make_request("r"))
        engine.core.abort(["r"])
    assert [output.details is None for output in scheduler.outbox.take()[0]] == [False] * 3
    scheduler.validate()


def test_requests_are_counted_by_client() -> None:
    """Those that wait and those that run, until they end or are aborted."""
    engine = make(max_num_seqs=1)
    for name, client_index in (("a", 2), ("b", 0), ("c", 2)):
        engine.add(make_request(name, client_index=client_index, max_tokens=2))
    engine.step()
    assert engine.core.stats().num_by_client == [1, 0, 2]
    engine.core.abort(["c", "unknown"])
    assert engine.core.stats().num_by_client == [1, 0, 1]
    engine.run()
    assert engine.core.stats().num_by_client == [0, 0, 0]


# -------------------------------------------------------------------------------- broken peers


@pytest.mark.parametrize(("step", "request_ids"), [(2, ["r"]), (1, []), (1, ["x"])])
def test_a_reply_that_does_not_fit_its_plan_is_an_error(step: int, request_ids: list[str]) -> None:
    """Going on would give tokens to the wrong requests; the ids tell what was mixed up."""
    engine = make()
    engine.add(make_request("r"))
    plan = engine.core._scheduler.schedule(0.0)
    assert plan is not None
    tokens = np.zeros(len(request_ids), dtype="<u4")
    expected = rf"step {step} .* requests {re.escape(str(request_ids))}, .* requests \['r'\]"
    with pytest.raises(RuntimeError, match=expected):
        engine.core._scheduler.update(plan, ModelRunnerOutput(step, request_ids, tokens))
