"""Wire 1: every message between API servers, engine cores and the DP coordinator.

    API server                                     engine core
    ROUTER binds   --[identity][type][body][arrays…]-->   DEALER connects
    ROUTER         <--[READY body]----------------------  DEALER, first frame on each
    PULL binds     <--[type][body][arrays…]-------------  PUSH connects

    coordinator, to engine cores one more API server      API server
    XPUB binds     --[LOADS][body]---------------------->   SUB connects
    PULL binds     <--[FIRST_REQUEST][body]--------------   PUSH connects

Bodies are msgpack arrays: position is the protocol. New fields go last, and a shorter array from an
older peer decodes to the defaults. Token ids travel as little-endian u32 buffers, never as lists;
no text travels but names, grammars and error causes. `codec` turns these structs into frames,
`tests/engine/test_wire_golden.py` freezes their bytes.
"""

import enum
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from engine.errors import WireError
from engine.sampling_params import SamplingParams

PROTOCOL_VERSION = 1

MAX_REQUEST_BYTES = 4 << 20
"""Body of a message to an engine core. Of what a client may send, banned words take the most: 0.6
MiB, and a grammar 0.25."""

# Bounds of what a peer may say, checked while decoding: of a list, before its elements are. A NaN
# is outside every range.
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
RequestIds = Annotated[list[RequestId], msgspec.Meta(max_length=1 << 16)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=(1 << 16) - 1)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
Counts = Annotated[list[Count], msgspec.Meta(max_length=1 << 16)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Wave = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""The number of one that somebody asks for, or ends: the next one can be told as well."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Packages = Annotated[dict[Name, Name], msgspec.Meta(max_length=256)]
Cause = Annotated[str, msgspec.Meta(max_length=1 << 16)]


def sendable(text: str) -> str:
    """Text that can travel: file names in messages may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


class RequestType(bytes, enum.Enum):
    """Type byte of a message to an engine core."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    FENCE = b"\x06"
    # In-process only: on the core's own queue. From a socket they are counted and dropped.
    EXECUTOR_FAILED = b"\x04"
    WAKEUP = b"\x05"


FROM_SOCKET = frozenset(
    {
        RequestType.ADD,
        RequestType.ABORT,
        RequestType.START_DP_WAVE,
        RequestType.UTILITY,
        RequestType.FENCE,
    }
)


class OutputType(bytes, enum.Enum):
    """Type byte of a message from an engine core, frame 0 on PULL."""

    OUTPUTS = b"\x00"
    HEARTBEAT = b"\x01"
    DEAD = b"\x02"


class CoordinatorType(bytes, enum.Enum):
    """Type byte of a message between API servers and coordinator. The values go on from
    OutputType's: what engine cores send comes to the same PULL."""

    FIRST_REQUEST = b"\x03"
    LOADS = b"\x04"


class FinishReason(enum.IntEnum):
    """Why a request ended: an integer on the wire, a word in the API."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    @property
    def word(self) -> str:
        return self.name.lower()


class EventKind(enum.IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class Message(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Base of everything that travels."""


# --------------------------------------------------------------------------- to the engine core


class MultiModalFeature(Message, frozen=True):
    """One processed image or sound of a prompt. On the wire, not served yet."""

    modality: Name
    hash: Name
    """Identifies the content; part of the block hashes of the tokens it covers."""
    offset: Count
    """First prompt token it stands for."""
    length: Count
    data: np.ndarray | None = None


class LoRARequest(Message, frozen=True):
    """A LoRA adapter to apply. On the wire, not served yet."""

    name: Name
    adapter_id: int
    path: Name


class PoolingParams(Message, frozen=True):
    """An embedding instead of a continuation. On the wire, not served yet."""

    task: Name
    dimensions: Count | None = None
    normalize: bool = True


class EngineCoreRequest(Message, frozen=True):
    """ADD: one sequence to generate. The first nine fields have no defaults."""

    request_id: RequestId
    """Ours: unique, whatever the client sent."""
    prompt_token_ids: np.ndarray | None
    """`[num_tokens]` u32; None only with `prompt_embeds`."""
    mm_features: Annotated[list[MultiModalFeature], msgspec.Meta(max_length=1024)] | None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    arrival_time: Seconds
    """Seconds since the epoch, on the API server's clock. Orders requests of one priority."""
    lora_request: LoRARequest | None
    cache_salt: Name | None
    """Part of the first block's hash: requests share cached prefixes only with the same salt."""
    data_parallel_rank: Rank | None
    prompt_embeds: np.ndarray | None = None
    client_index: Rank = 0
    """Which API server sent it, and so which PULL gets its outputs."""
    current_wave: Count = 0
    priority: Priority = 0
    """Lower runs first, with the priority policy."""
    trace_headers: Annotated[dict[Name, Name], msgspec.Meta(max_length=16)] | None = None
    output_token_ids: np.ndarray | None = None
    """`[num_tokens]` u32, generated elsewhere already: generation continues exactly after them, and
    penalties, seeds, stop checks and `max_tokens` count them as output. They are not sent again."""

    def __post_init__(self) -> None:
        if self.prompt_token_ids is None and self.prompt_embeds is None:
            raise WireError("a request has prompt_token_ids or prompt_embeds")
        for tokens in (self.prompt_token_ids, self.output_token_ids):
            if tokens is not None and (tokens.dtype != np.uint32 or tokens.ndim != 1):
                raise WireError(f"token ids are u32 in one row, not {tokens.dtype} {tokens.shape}")


class StartWave(Message, frozen=True):
    """START_DP_WAVE: step together until all ranks are done."""

    wave: Count
    exclude_engine: Rank | None = None


class UtilityCall(Message, frozen=True):
    """UTILITY: run one method of the allow-list on the engine core."""

    client_index: Rank
    call_id: Count
    method: Name
    args: msgspec.Raw
    """A msgpack array; its types are the method's (`engine/utility.py`)."""


class Fence(Message, frozen=True):
    """FENCE: the engine core that speaks under this epoch, or an earlier one, has been given up and
    its requests are elsewhere: nothing that it says counts, and it ends itself."""

    epoch: Epoch


# ------------------------------------------------------------------------- from the engine core


class Fingerprint(Message, frozen=True):
    """What must be equal on all ranks of a server."""

    protocol: Count
    code: Name
    packages: Packages
    model: Name
    tokenizer: Name


class EngineReady(Message, frozen=True):
    """READY: the first frame on each DEALER. What the API server needs and cannot know before."""

    engine_index: Rank
    epoch: Epoch
    max_model_len: Count
    """After auto-fitting to memory."""
    num_gpu_blocks: Count
    block_size: Size
    kv_cache_size_tokens: Count
    dtype: Name
    vocab_size: Count
    """Rows of the embedding: token ids at or above it are refused."""
    max_num_seqs: Count
    fingerprint: Fingerprint
    load_s: Seconds = 0.0
    """From the start of the process until now."""
    weights_s: Seconds = 0.0
    """Of which the slowest worker spent this on loading weights,"""
    kv_cache_s: Seconds = 0.0
    """and all of them this on allocating the KV cache and warming up."""
    has_prefix_cache: bool = True
    """Whether it finds earlier prompts' blocks again (`--enable-prefix-caching`)."""
    imports_s: Seconds = 0.0
    """Of `load_s`, before the weights: importing the model's code;"""
    kernels_s: Seconds = 0.0
    """after them: building kernels, packing weights and proving both right."""


class Logprobs(Message, frozen=True):
    """Log probabilities of `n` tokens, each with its `k` best alternatives.

    Column 0 is the token itself, columns 1 to k the best tokens in falling order. A request's own
    number of alternatives is the width: rows are never padded.
    """

    token_ids: np.ndarray
    """`[n, 1 + k]` u32."""
    logprobs: np.ndarray
    """`[n, 1 + k]` f32, of the raw model distribution: before penalties, bias, temperature and
    cuts."""
    ranks: np.ndarray
    """`[n]` u32: rank of the token itself, 1 is the best."""


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """One for the tokens of all `parts`, of which there is at least one, in their order."""
    if len(parts) == 1:
        return parts[0]
    return Logprobs(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


class EngineCoreEvent(Message, frozen=True):
    """A change of a request's state, stamped with the core's own monotonic clock, in seconds."""

    kind: EventKind
    timestamp: Seconds


class PrefillStats(Message, frozen=True):
    """Sent once, with the first token of a request."""

    num_prompt_tokens: Count
    num_cached_tokens: Count
    """Prompt tokens that were found in the prefix cache when the request was first scheduled."""


class OutputDetails(Message, frozen=True):
    """The rare fields of an output, together, so that the usual output is five values long."""

    new_logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooling_output: np.ndarray | None = None
    events: Annotated[list[EngineCoreEvent], msgspec.Meta(max_length=1 << 16)] | None = None
    prefill_stats: PrefillStats | None = None
    error: Cause | None = None
    """Cause of FinishReason.ERROR, for the client: names no path, address or traceback."""
    error_code: Name | None = None
    """With `error`: it is the request's own fault, of this code (`errors.RequestError`)."""
    error_param: Name | None = None
    """And this is the field."""


class EngineCoreOutput(Message, frozen=True):
    """What one step brought one request."""

    request_id: RequestId
    new_token_ids: bytes
    """Little-endian u32 (`codec.unpack_tokens`); empty where only the state changed."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token id that ended it; None for the model's own end token."""
    details: OutputDetails | None = None


class SchedulerStats(Message, frozen=True):
    """Load and counters of an engine core after a step. Counters count from its start."""

    num_waiting: Count
    num_running: Count
    kv_cache_usage: Share
    """Share of blocks that requests hold, 0 to 1."""
    num_steps: Count = 0
    num_preemptions: Count = 0
    prefix_cache_queries: Count = 0
    """Prompt tokens of requests that were looked up in the prefix cache, when they first ran."""
    prefix_cache_hits: Count = 0
    """Those of them that were found."""
    num_prompt_tokens: Count = 0
    """Prompt tokens of requests that have put out their first token."""
    num_generation_tokens: Count = 0
    num_dropped_messages: Count = 0
    """Messages from sockets that broke the protocol."""
    num_by_client: Counts = []
    """Requests that wait or run, by client index: an API server knows its own better. Clients that
    have none may be missing at the end."""
    num_evicted_blocks: Count = 0
    """Blocks of the prefix cache whose content had to make room."""


NIL = msgspec.Raw(b"\xc0")


class UtilityOutput(Message, frozen=True):
    """Answer to a UtilityCall: a result, or the failure's text."""

    call_id: Count
    failure: Cause | None = None
    result: msgspec.Raw = NIL
    """msgpack of the method's result type; nil with a failure. Never `Raw | None`, which msgspec
    decodes as None only."""


class EngineCoreOutputs(Message, frozen=True):
    """OUTPUTS: everything one step has for one API server."""

    engine_index: Rank
    epoch: Epoch
    outputs: Annotated[list[EngineCoreOutput], msgspec.Meta(max_length=1 << 16)] = []
    stats: SchedulerStats | None = None
    timestamp: Seconds = 0.0
    """The core's monotonic clock when the step ended: all tokens in `outputs` appeared then."""
    utility: UtilityOutput | None = None
    finished_ids: RequestIds | None = None
    wave_complete: Wave | None = None
    start_wave: Wave | None = None


class Phase(enum.IntEnum):
    """What an engine core is doing, for heartbeats and post-mortems."""

    LOADING = 0
    IDLE = 1
    SCHEDULE = 2
    EXECUTE = 3
    UPDATE = 4
    UTILITY = 5


class Heartbeat(Message, frozen=True):
    """HEARTBEAT: alive, and how long the step under way has taken. A core that hangs is a dead
    core."""

    engine_index: Rank
    epoch: Epoch
    step: Count
    age_ms: Count
    """Time since the phase under way began; 0 when idle."""
    phase: Phase


ENGINE_CORE_DEAD: Literal["ENGINE_CORE_DEAD"] = "ENGINE_CORE_DEAD"


class EngineDead(Message, frozen=True):
    """DEAD: the last message of an engine core."""

    literal: Literal["ENGINE_CORE_DEAD"]
    engine_index: Rank
    epoch: Epoch
    cause: Cause
    is_told: bool = True
    """Whether the cause needs no ERROR any more. False: of several ranks that fail alike only one
    was the first, so whoever hears of the first logs it."""


# -------------------------------------------------------------- between API servers and coordinator


class EngineLoad(Message, frozen=True):
    """What one rank has to do, as it said last. The fields are those of SchedulerStats."""

    engine_index: Rank
    epoch: Epoch
    num_waiting: Count
    num_running: Count
    kv_cache_usage: Share
    num_by_client: Counts = []


class LoadReport(Message, frozen=True):
    """LOADS: the whole of what the coordinator knows, so that a lost one does no harm."""

    loads: Annotated[list[EngineLoad], msgspec.Meta(max_length=1 << 16)]
    """Of the ranks that are ready, in their order."""
    wave: Count = 0
    """The wave under way, or the next one."""
    is_running: bool = False
    """Whether it is under way."""


class FirstRequest(Message, frozen=True):
    """FIRST_REQUEST: an API server has sent a request though all ranks pause, as far as it knows.
    Only to lock-step ranks, where the others must begin to step as well."""

    engine_index: Rank
    """Who got the request."""
    wave: Wave
    """What the API server takes for the next wave."""


_IDENTITY = struct.Struct("<HI")


def pack_identity(engine_index: int, epoch: int) -> bytes:
    """The DEALER's ZeroMQ identity: rank (u16) and epoch (u32), little-endian.

    A restarted rank comes under a new epoch and so never fights its old identity.
    """
    # ZeroMQ keeps identities that start with a zero byte for itself when it makes them up (5 bytes
    # long); ours are 6 bytes, so rank 0 is safe.
    return _IDENTITY.pack(engine_index, epoch)


def unpack_identity(identity: bytes) -> tuple[int, int]:
    """(engine_index, epoch) of a DEALER's identity."""
    if len(identity) != _IDENTITY.size:
        raise WireError(
            f"an engine core's identity has {_IDENTITY.size} bytes, not {len(identity)}"
        )
    engine_index, epoch = _IDENTITY.unpack(identity)
    return engine_index, epoch
