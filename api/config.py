"""Frozen settings of an API server. Built by `cluster`, which reads flags and environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from api import limits
from api.keys import AccessConfig
from api.tls import TlsConfig
from engine.config import Policy
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    served_model_names: tuple[str, ...]
    """Names that requests may use for the model; the first one is shown in answers
    (`--served-model-name`)."""

    shutdown_timeout_s: float = 20.0
    """After the first stop signal, running requests may take this long to finish; below the 30 s
    that Kubernetes grants by default."""

    start_timeout_s: float = 660.0
    """All engine cores must be ready by then: the workers' 600 s, and a minute for the rest."""

    scheduling_policy: Policy = "fcfs"
    """With "fcfs" a request that asks for a `priority` is refused rather than misunderstood."""

    first_rank: int = 0
    """The data-parallel rank of engine core 0: users count all ranks, also those of other servers
    (hybrid and external balancing)."""

    max_body_bytes: int = limits.MAX_BODY_BYTES
    """Larger request bodies are a 413, refused while they are read."""

    body_timeout_s: float = limits.BODY_TIMEOUT_S
    """A request body of which nothing has come for so long is a 408."""

    max_n: int = limits.DEFAULT_MAX_N
    """Largest `n` and `best_of` of one request (`--max-n`)."""

    max_sequences: int = limits.MAX_SEQUENCES
    """Largest number of prompts times `n` of one request."""

    send_timeout_s: float = limits.SEND_TIMEOUT_S
    """A client that has not read its answer for so long is cut off (`--send-timeout`)."""

    max_num_queued_reqs: int | None = None
    """Sequences that this API server has in flight at most, waiting or running; beyond it requests
    are refused (`--max-num-queued-reqs`, of which each of several API servers has its share)."""

    max_num_queued_tokens: int | None = None
    """The same for prompt tokens that have yet to be computed (`--max-num-queued-tokens`)."""

    num_text_threads: int = 2
    """Threads that tokenize prompts and render templates, off the event loop; long texts have one
    more."""

    access_log: bool = True
    """One line per request; never for probes and metrics."""

    dead_linger_s: float = 1.0
    """After an engine core's death the port keeps answering 503 for this long, so that clients and
    probes get a straight answer before the process exits."""

    chat_template: str | None = None
    """Jinja text used instead of the model's own template (`--chat-template`)."""

    generation_config: str = "auto"
    """Where defaults of sampling are read (`--generation-config`): "auto" is the model's folder,
    "vllm" nowhere."""

    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of sampling that come before those (`--override-generation-config`)."""

    trust_request_chat_template: bool = False
    """Requests may bring a template of their own (`--trust-request-chat-template`): a program,
    sandboxed and bounded in time, but able to keep a core busy for that time."""

    return_tokens_as_token_ids: bool = False
    """Log probabilities write tokens as `token_id:7`, unless a request says otherwise
    (`--return-tokens-as-token-ids`)."""

    tool_call_parser: str | None = "auto"
    """Family of the model's tool calls (`--tool-call-parser`): a name in `api.tools.select`, or
    "auto" for the one whose markers the chat template has. None: requests with tools are
    refused."""

    reasoning_parser: str | None = None
    """Family of the model's thoughts (`--reasoning-parser`): a name in `api.reasoning`, or "auto".
    None: thoughts are content."""

    allowed_origins: tuple[str, ...] = ()
    """Web sites whose scripts browsers let speak to this server (`--allowed-origins`); "*" is all
    of them. Empty: none, and no CORS header is ever sent."""

    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    """What those scripts may use; "*" is everything."""

    allow_credentials: bool = False
    """Whether those scripts may send cookies and the like."""

    root_path: str = ""
    """Where a proxy has put this server (`--root-path`): `/llm` where clients know `/v1/models` as
    `/llm/v1/models`. Requests may come with it or without."""

    has_docs: bool = True
    """Whether there are `/openapi.json` and `/docs` (`--disable-fastapi-docs`)."""

    access: AccessConfig = field(default_factory=AccessConfig)
    """Keys, and what they open."""

    tls: TlsConfig | None = None
    """What the port speaks; None: plain HTTP."""

    profile_dir: str | None = None
    """Where an administrator's profiles go; None: nowhere, and there are none."""

    max_stored_responses: int = limits.DEFAULT_MAX_STORED_RESPONSES
    """So many responses of /v1/responses are kept, to be read again or continued
    (`--max-stored-responses`). 0: none."""

    max_stored_bytes: int = limits.MAX_STORED_BYTES
    """What they may take together."""

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("--served-model-name must not be empty")
        if self.shutdown_timeout_s < 0:
            raise ConfigError(
                f"--shutdown-timeout must not be negative, not {self.shutdown_timeout_s}"
            )
