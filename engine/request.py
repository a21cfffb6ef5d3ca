"""One request inside an engine core, and its legal status changes.

            add               admit              finish
    (new) ------->  WAITING  ------->  RUNNING  ------->  FINISHED
                                        |   ^                ^
                                preempt |   | resume         | abort: from anywhere
                                        v   |                |
                                      PREEMPTED -------------+

Built by `EngineCore.prepare` on the input thread; from `add` on only the core's main thread
touches it. `scheduler` decides, `kv_cache_manager` fills in the blocks, `stop` reads the limits.
One with a structured output waits for its matcher before it is added (`grammar.station`).
"""

import enum
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.block_hash import hash_full_blocks, root_hash
from engine.codec import Array
from engine.grammar.matcher import Matcher
from engine.sampling_params import SamplingParams
from engine.wire import EngineCoreEvent, EngineCoreRequest, Logprobs, MultiModalFeature

TOKEN_TYPE = "I"
"""Type code of a u32 in `array`, which appends faster than numpy and hands out its bytes."""


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


_LEGAL = {
    Status.WAITING: (Status.RUNNING, Status.FINISHED),
    Status.RUNNING: (Status.PREEMPTED, Status.FINISHED),
    Status.PREEMPTED: (Status.RUNNING, Status.FINISHED),
    Status.FINISHED: (),
}


class Request:
    """One sequence. Fields are plain, because hundreds of requests are walked through each step."""

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_ids",
        "block_size",
        "client_index",
        "events",
        "has_sent_token",
        "joined_step",
        "matcher",
        "max_num_tokens",
        "min_num_tokens",
        "mm_features",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_tokens",
        "priority",
        "prompt_logprobs",
        "request_id",
        "root_hash",
        "sampling_params",
        "sort_key",
        "status",
        "stop_token_ids",
        "token_ids",
        "unsent_token",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Array,
        sampling_params: SamplingParams,
        *,
        max_model_len: int,
        block_size: int,
        output_token_ids: Array | None = None,
        client_index: int = 0,
        priority: int = 0,
        arrival_time: float = 0.0,
        mm_features: Sequence[MultiModalFeature] = (),
        root_hash: bytes | None = None,
    ) -> None:
        """`root_hash` None: the blocks are not hashed, so never shared."""
        self.request_id = request_id
        self.client_index = client_index
        self.priority = priority
        self.arrival_time = arrival_time
        self.sampling_params = sampling_params
        self.mm_features = mm_features
        self.matcher: Matcher | None = None
        """Of its structured output, if it has one: what it may sample next."""

        self.token_ids = array(TOKEN_TYPE, prompt_token_ids.tobytes())
        """The prompt, then the output."""
        self.num_prompt_tokens = len(self.token_ids)
        if output_token_ids is not None:
            self.token_ids.frombytes(output_token_ids.tobytes())
        self.num_tokens = len(self.token_ids)

        self.max_num_tokens = max_model_len
        """Prompt and output together end here."""
        if sampling_params.max_tokens is not None:
            limit = self.num_prompt_tokens + sampling_params.max_tokens
            self.max_num_tokens = min(limit, max_model_len)
        self.min_num_tokens = self.num_prompt_tokens + sampling_params.min_tokens
        self.stop_token_ids = frozenset(sampling_params.ending_token_ids)

        self.status = Status.WAITING
        self.sort_key: tuple[float, ...] = ()
        """Lowest first, in both the waiting and the running queue; set by the scheduler."""
        self.joined_step = 0
        """The step in which it last joined the workers' batch. Replies to older steps are stale."""

        self.num_computed_tokens = 0
        """Tokens whose KV is in the blocks once all steps under way have run. One more than are
        known, if the next token is computed before it has come back."""
        self.unsent_token = b""
        """The last sampled token, packed, as long as the workers have not been told; `OWN_TOKEN`
        where they are to put it in themselves."""
        self.block_ids: list[int] = []
        self.num_registered_blocks = 0
        """The first so many blocks are in the prefix cache, this request's own or its equals."""

        self.block_size = block_size
        self.root_hash = root_hash
        self.block_hashes: list[bytes] = []
        """Of each full block of `token_ids`, computed or not."""
        self._extend_hashes()

        self.events: list[EngineCoreEvent] = []
        """Not sent yet."""
        self.num_cached_tokens = -1
        """Prompt tokens found in the prefix cache at first; -1 before that."""
        self.has_sent_token = False
        """This engine core has put a token out; with it went all that is sent once."""
        self.prompt_logprobs: list[Logprobs] = []

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Its whole prompt must go through the model, so cached prefixes are of no use to it."""
        return self.sampling_params.prompt_logprobs is not None and not self.has_sent_token

    @property
    def can_share_blocks(self) -> bool:
        """The prefix cache is asked for its blocks."""
        return self.root_hash is not None and not self.wants_prompt_logprobs

    def params_for_workers(self) -> SamplingParams:
        """Its sampling parameters as a plan tells them: what was sent is not computed again."""
        if self.wants_prompt_logprobs or self.sampling_params.prompt_logprobs is None:
            return self.sampling_params
        return msgspec.structs.replace(self.sampling_params, prompt_logprobs=None)

    def move_to(self, status: Status) -> None:
        assert status in _LEGAL[self.status], f"{self.request_id}: {self.status} to {status}"
        self.status = status

    def append(self, token_id: int, packed: bytes) -> None:
        """Take in a sampled token."""
        if self.num_computed_tokens <= self.num_tokens:  # else it runs, and the workers have it
            self.unsent_token = packed
        self.token_ids.append(token_id)
        self.num_tokens += 1
        if not self.num_tokens % self.block_size:
            self._extend_hashes()

    def restart(self) -> None:
        """Forget what is computed: the blocks are gone. Tokens and limits stay."""
        self.block_ids = []
        self.num_registered_blocks = 0
        self.num_computed_tokens = 0
        self.unsent_token = b""  # a request that joins the batch is sent whole
        if not self.has_sent_token:
            self.prompt_logprobs = []

    def token_array(self) -> Array:
        """A copy of all its tokens, `[num_tokens]` u32, as they travel."""
        return np.array(self.token_ids, dtype="<u4")

    def _extend_hashes(self) -> None:
        if self.root_hash is None:
            return
        start = len(self.block_hashes) * self.block_size
        self.block_hashes += hash_full_blocks(
            self.block_hashes[-1] if self.block_hashes else self.root_hash,
            self.token_ids[start:].tobytes(),
            self.block_size,
            start,
            self.mm_features,
        )

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.status.name}"
            f" computed={self.num_computed_tokens}/{self.num_tokens}>"
        )


def from_wire(
    message: EngineCoreRequest, *, max_model_len: int, block_size: int, is_cached: bool
) -> Request:
    """The scheduler's request of a message that has been checked (`engine.admission`).

    `is_cached` hashes its blocks, so that it shares them; this is the slow part.
    """
    assert message.prompt_token_ids is not None
    assert message.sampling_params is not None
    return Request(
        message.request_id,
        message.prompt_token_ids,
        message.sampling_params,
        max_model_len=max_model_len,
        block_size=block_size,
        output_token_ids=message.output_token_ids,
        client_index=message.client_index,
        priority=message.priority,
        arrival_time=message.arrival_time,
        mm_features=message.mm_features or (),
        root_hash=root_hash(message.lora_request, message.cache_salt) if is_cached else None,
    )
