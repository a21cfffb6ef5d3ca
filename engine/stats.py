"""What an engine core has done since its start: counters that only grow. The scheduler counts,
`EngineCore.stats` adds the gauges and sends them."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens of requests when they were first scheduled."""
    prefix_cache_hits: int = 0
    """Those of them that were found."""
    num_prompt_tokens: int = 0
    """Prompt tokens of requests that have put out their first token."""
    num_generation_tokens: int = 0
