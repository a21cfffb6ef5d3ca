"""What an engine core has done since its start: counters that only grow. The scheduler counts, adds
the gauges and hands both out as `wire.SchedulerStats`, which documents them: the names are its."""

import msgspec


class Counters(msgspec.Struct, gc=False):
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
