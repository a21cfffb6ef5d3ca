"""Flags that vLLM's users give out of habit and that we do not have: what to do instead.

Used by `option_groups`, in place of click's "no such option". A test sees to it that none of them
is a flag of ours.
"""

from collections.abc import Collection, Sequence

_ADVICE = {
    "--api-key": "does not exist yet; until then let a proxy in front of the port check keys",
    "--config": "does not exist; flags and environment are all there is",
    "--disable-log-requests": "is not needed: requests are one line each, without their text",
    "--download-dir": "does not exist; HF_HOME moves downloads, RAYWIRE_CACHE_DIR conversions",
    "--enable-offline-docs": "is not needed: /docs loads nothing from elsewhere",
    "--enable-server-load-tracking": "is not needed: /load always counts",
    "--enable-lora": "does not exist yet",
    "--enforce-eager": "is not needed: models run without CUDA graphs",
    "--exclude-tools-when-tool-choice-none": "is not needed: the model does not see them then",
    "--gpu-memory-utilization": "does not exist; --kv-cache-memory-bytes says what the KV cache may"
    " take (unless given, 90% of the memory that is free after loading)",
    "--logprobs-mode": "does not exist: log probabilities are the model's own, before anything that"
    " a request changes (vLLM's raw_logprobs)",
    "--max-logprobs": "does not exist; requests may ask for 20, or for 128 tokens by their ids"
    " (logprob_token_ids)",
    "--revision": "does not exist yet; download that revision and give its folder",
    "--stream-interval": "does not exist; requests have a stream_interval",
    "--swap-space": "does not exist: what is preempted is computed again",
    "--tokenizer": "does not exist; the tokenizer comes from the model's folder",
    "--tool-parser-plugin": "does not exist; --tool-call-parser has the parsers that there are",
    "--trust-remote-code": "does not exist, on purpose: code of a model's repository is not run",
    "--uvicorn-log-level": "does not exist; --log-level is for all",
}


def advice(flag: str, args: Sequence[str], ours: Collection[str]) -> str | None:
    """What to tell somebody who gave a flag that we lack, None if we know nothing better.

    Args:
        flag: as given, without its value.
        args: the whole command line.
        ours: the flags that there are.
    """
    dashed = flag.replace("_", "-")
    if dashed in ours:
        return f"{flag} is written {dashed}"
    if dashed == "--model":
        return f"MODEL is the argument: raywire serve {_value(flag, args)}"
    return f"{dashed} {_ADVICE[dashed]}" if dashed in _ADVICE else None


def _value(flag: str, args: Sequence[str]) -> str:
    """What follows `flag`, or the word MODEL."""
    for arg, following in zip(args, [*args[1:], "MODEL"], strict=True):
        name, sign, value = arg.partition("=")
        if name == flag:
            return value if sign else following
    return "MODEL"
