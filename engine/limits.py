"""Bounds on what a client may ask of an engine core, in one place. `raywire limits` prints them,
together with those of an API server (`api.limits`).

Used by whoever checks. Bounds on what our own processes send each other are not here: they stand
where a message is decoded (`codec`, `wire`, `sockets`, `input_thread`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound, as people read it."""

    name: str
    """The field of a request that it bounds, or what else."""

    most: float
    """The largest value that passes."""

    unit: str
    """Of that value; empty for a plain number."""

    what: str
    """What has so many of it."""

    least: float | None = None
    """The smallest value that passes, for numbers that clients give."""

    flag: str = ""
    """Of `raywire serve`, that changes it."""


# --------------------------------------------------------------------------------------- sampling

MAX_TOKEN_ID = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 512
"""Sequences of tokens. A word has one or two."""
MAX_BAD_WORD_TOKENS = 256
MAX_REPETITION_TOKENS = 256
MAX_REPETITIONS = 1000

RANGES = (
    Limit("temperature", 100.0, "", "below 0.00001 is greedy", 0.0),
    Limit("top_p", 1.0, "", "0 itself is refused", 0.0),
    Limit("top_k", MAX_TOKEN_ID, "tokens", "0 and -1: all", -1),
    Limit("min_p", 1.0, "", "of the likeliest token's probability", 0.0),
    Limit("seed", MAX_SEED, "", "64 bits", -MAX_SEED - 1),
    Limit("repetition_penalty", 100.0, "", "a factor", 0.01),
    Limit("presence_penalty", 2.0, "", "taken from logits", -2.0),
    Limit("frequency_penalty", 2.0, "", "taken from logits, for each time", -2.0),
    Limit("max_tokens", MAX_TOKEN_ID, "tokens", "and what the model's length leaves", 1),
    Limit("min_tokens", MAX_TOKEN_ID, "tokens", "and max_tokens", 0),
    Limit("logprobs", MAX_LOGPROBS, "tokens", "at each place, top_logprobs too", 0),
    Limit("prompt_logprobs", MAX_LOGPROBS, "tokens", "at each place of the prompt", 0),
)
"""Of each number that says how to sample, by its name in `SamplingParams`."""

# ------------------------------------------------------------------------------ structured output

MAX_SPEC_BYTES = 256 << 10
"""Of a description: what a client may send is less (`api/`), what is made of it may be more."""

MAX_COMPILE_S = 1.5
"""For one grammar: with a process that has to start again, its client knows within two seconds.
Those that people write take milliseconds. Of the processor's time, so that on a machine that is
busy with other things the same grammars are refused as elsewhere."""

MAX_COMPILE_BYTES = 1 << 30
MAX_COMPILED_BYTES = 32 << 20
MAX_COMPILED_CACHE_BYTES = 128 << 20
"""Of compiled grammars that no running request need have. A schema takes a tenth of a MiB."""

MAX_MASK_S = 0.5
"""A mask that takes longer ends its request: the steps of all others wait for it. Of the regular
expressions and grammars that are made to be slow, the library's own limits leave 0.3 s."""

MAX_LEXER_STATES = 20_000
"""Up to 3 kB each, and all requests of a grammar share them."""

MAX_GRAMMAR_SYMBOLS = 200_000

# -------------------------------------------------------------------------------------- the table

SAMPLING = (
    *RANGES,
    Limit("logit_bias", MAX_BIAS, "", "added to a token's logit", -MAX_BIAS),
    Limit("logit_bias", MAX_LOGIT_BIAS, "token ids", "allowed_token_ids too"),
    Limit("stop_token_ids", MAX_STOP_TOKEN_IDS, "token ids", "of a request"),
    Limit("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS, "token ids", "of a request"),
    Limit("bad_words", MAX_BAD_WORDS, "spellings", "a word has one or two"),
    Limit("bad_words", MAX_BAD_WORD_TOKENS, "tokens", "of a spelling"),
    Limit("repetition_detection", MAX_REPETITION_TOKENS, "tokens", "max_pattern_size", 0),
    Limit("repetition_detection", MAX_REPETITIONS, "times", "min_count", 2),
)
GRAMMARS = (
    Limit("a request's grammar", MAX_SPEC_BYTES, "bytes", "all that it asks for, as one grammar"),
    Limit("compiling", MAX_COMPILE_S, "seconds", "of the processor, in a process of its own"),
    Limit("compiling", MAX_COMPILE_BYTES, "bytes", "memory of that process"),
    Limit("compiling", MAX_GRAMMAR_SYMBOLS, "symbols", "of a grammar"),
    Limit("a compiled grammar", MAX_COMPILED_BYTES, "bytes", "in memory"),
    Limit("compiled grammars", MAX_COMPILED_CACHE_BYTES, "bytes", "kept by an engine core"),
    Limit("a mask", MAX_MASK_S, "seconds", "to say which tokens may come next"),
    Limit("a mask", MAX_LEXER_STATES, "states", "of a grammar's lexer"),
)
