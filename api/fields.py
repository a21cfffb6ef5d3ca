"""Fields of OpenAI and vLLM that no struct of `protocol` has: refused, each with its reason, or
accepted without an effect. Used by the two generating routes when they decode a body.

A field that is neither here nor in a struct is unknown: it is ignored, and the answer says so.
`docs/api.md` has the whole table, section "Fields"; a test compares it with this file and with
vLLM's own list.
"""

from api.body import Refusal
from api.protocol import ChatBody, CompletionBody, RepetitionFields, StreamOptions
from api.structured import fields as structured

_TRANSFER = Refusal("this server computes prompt and answer in one place")
_TEXT_ONLY = Refusal("prompts and answers are text")
_NO_LORA = Refusal("there are no LoRA adapters yet")

_REFUSED_IN_BOTH: dict[str, Refusal] = {
    "ec_transfer_params": _TRANSFER,
    "kv_transfer_params": _TRANSFER,
    "logits_processors": Refusal("a request cannot bring code"),
    "lora_request": _NO_LORA,
    "pooling_params": Refusal("a generating model does not pool"),
    "prompt_embeds": Refusal("send a text or token ids"),
    "routed_experts_prompt_start": Refusal("which experts a token took is not recorded"),
    "vllm_xargs": Refusal("there are no plugins that could read them"),
    "watermarking": Refusal("answers have no watermark"),
}
UNSUPPORTED_IN_COMPLETIONS = _REFUSED_IN_BOTH | {
    "suffix": Refusal(
        "models mark the gap in the middle of a text in their own ways; write those marks into"
        " the prompt"
    ),
}
UNSUPPORTED_IN_CHAT = _REFUSED_IN_BOTH | {
    "audio": _TEXT_ONLY,
    "function_call": Refusal("send tool_choice", ("none", "auto")),
    "functions": Refusal("send tools"),
    "media_io_kwargs": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "modalities": Refusal(_TEXT_ONLY.reason, (["text"],)),
    "reasoning": Refusal("send reasoning_effort"),
    "verbosity": Refusal("ask for a long or short answer in the messages", ("medium",)),
    "web_search_options": Refusal("this server searches nothing"),
}

IGNORED = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "mm_payload",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "return_mm_kwargs",
        "return_token_offsets",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Accepted without an effect, and not worth a warning: bookkeeping, hints about speed or price, and
what says how vLLM shows a rendered prompt, which has no effect here in vLLM either."""

KNOWN_IN_COMPLETIONS = frozenset(CompletionBody.__struct_fields__) | IGNORED
KNOWN_IN_CHAT = frozenset(ChatBody.__struct_fields__) | IGNORED

NESTED = {
    "repetition_detection": frozenset(RepetitionFields.__struct_fields__),
    "stream_options": frozenset(StreamOptions.__struct_fields__),
    **structured.NESTED,
}
"""What fields that are objects may hold: anything else in them is ignored and reported as well."""
