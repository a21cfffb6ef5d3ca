"""Wire 2: what goes from an engine core to its workers each step, and what comes back.

Workers keep the state of the requests in their batch between steps (token ids, block tables,
sampling parameters), so a step says only what has changed. The order inside a plan is the order of
the rows:

    1. `dropped_request_ids` leave the batch (finished, aborted or preempted),
    2. `new_requests` join it (also resumed ones, which are sent whole again),
    3. `continued` requests get new tokens and blocks,
    4. each request in `num_scheduled_tokens` runs that many tokens from its `num_computed_tokens`
    on.

A request samples one token when the scheduled tokens reach the end of its known tokens.

A step may be planned while the one before it runs (async scheduling). For a request that samples in
that one, the plan has `OWN_TOKEN` in place of the token: the workers put in what they have sampled.
Whether the token ends the request, the core learns too late; then the row is in vain, and what
comes back for it is dropped.

A request may share a block that another one fills in this very step: in each layer the keys and
values of all scheduled tokens are written before any of them attends. Each rank runs the plans in
the order they were made, so a block that was taken from a request may be given to another while
steps are under way.

A plan that `awaits_masks` is not sampled at once: the workers run the forward pass and keep the
logits until `TokenMasks` of that step come, with what requests with a structured output may sample.
The engine core makes them meanwhile, and sends them before the next plan. The reply is the same, to
the plan.
"""

import numpy as np

from engine.sampling_params import SamplingParams
from engine.wire import Logprobs, Message

NO_TOKEN = 0xFFFF_FFFF
"""No token id: those end at `MAX_TOKEN_ID`."""

OWN_TOKEN = NO_TOKEN.to_bytes(4, "little")
"""Among new tokens: the one that the workers have sampled themselves, in the last step."""


class NewRequest(Message, frozen=True):
    """A request that joins the workers' batch."""

    request_id: str
    token_ids: np.ndarray
    """`[num_tokens]` u32: the prompt, then the output so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is in the blocks already: found in the prefix cache, or 0."""
    block_ids: list[int]
    """All its blocks, in order; it covers computed and scheduled tokens."""
    sampling_params: SamplingParams


class ContinuedRequests(Message, frozen=True):
    """Requests that the workers know, as columns: one entry each."""

    request_ids: list[str] = []
    num_computed_tokens: list[int] = []
    new_token_ids: list[bytes] = []
    """Tokens that the core has accepted since the request was last scheduled, packed u32, or
    `OWN_TOKEN`; empty inside a prefill."""
    new_block_ids: list[list[int]] = []


class SchedulerOutput(Message, frozen=True):
    """The plan of one step: `execute_model`'s argument."""

    step: int
    num_scheduled_tokens: dict[str, int]
    """Request id to tokens, in the order of the batch's rows."""
    new_requests: list[NewRequest] = []
    continued: ContinuedRequests = ContinuedRequests()
    dropped_request_ids: list[str] = []
    awaits_masks: bool = False
    """`TokenMasks` of this step will follow."""


class TokenMasks(Message, frozen=True):
    """Which tokens some requests of a step may sample: `sample_tokens`' argument. Those that are
    not named may sample any."""

    step: int
    request_ids: list[str] = []
    bits: np.ndarray = np.zeros((0, 0), "<u4")
    """`[len(request_ids), ceil(vocab_size / 32)]` u32: token i is allowed if bit i % 32 of word
    i // 32 is set."""


class ModelRunnerOutput(Message, frozen=True):
    """The reply of the output rank to `execute_model`."""

    step: int
    request_ids: list[str]
    """The requests that sampled a token, in the plan's order."""
    sampled_token_ids: np.ndarray
    """`[len(request_ids)]` u32. `NO_TOKEN` where all requests of the step had ended before."""
    logprobs: dict[str, Logprobs] = {}
    """For requests that asked for them: `n` is 1."""
    prompt_logprobs: dict[str, Logprobs] = {}
    """For requests that asked: of the prompt tokens whose predecessor was computed in this step."""


class WorkerReport(Message, frozen=True):
    """What one rank knows after loading; the core takes the minimum over ranks."""

    rank: int
    dtype: str
    vocab_size: int
    """Rows of the embedding over all ranks."""
    model_max_len: int
    """The longest position the model was made for."""
    kv_bytes_per_token: int
    """On this rank, over its layers, of which it has one at least."""
    kv_budget_bytes: int
    """What this rank can give to the KV cache."""
    block_size: int = 16
    """Tokens of a KV block as this rank's attention reads it best: used unless the user says."""
    has_free_core: bool = False
    """Computing leaves a core to the engine core: a GPU computes, or not all cores do."""
    weight_bytes: int = 0
    load_s: float = 0.0
    description: str = ""
    """Device, threads and attention back end, for the log."""
    imports_s: float = 0.0
    """Of `load_s`: importing the model's code,"""
    kernels_s: float = 0.0
    """and building kernels, packing weights for them and proving them equal."""


class WorkerStats(Message, frozen=True):
    """Answer of each rank to `statistics`."""

    rank: int
    pid: int
    num_steps: int
    rss_bytes: int
    num_requests: int


class KVCacheSpec(Message, frozen=True):
    """Argument of `initialize_kv_cache`."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
