"""Bounds on everything that a client sends, in one place. `raywire limits` prints them, and
`docs/api.md` has the table.

Whoever reads a field checks it, and takes its bound from here; what an engine core bounds is in
`engine.limits`. A test finds numbers that stand elsewhere. Imports nothing heavy: the command line
uses it too.
"""

from engine.limits import GRAMMARS, MAX_LOGPROBS, MAX_TOKEN_ID, SAMPLING, Limit

# -------------------------------------------------------------------------- connections and bodies

MAX_HEAD_BYTES = 1 << 16
HEAD_TIMEOUT_S = 60.0
"""From the first byte of a request, or the connection, to the end of its header lines."""

MAX_CONNECTIONS = 8192
"""Each may hold as much as a head and what is read ahead of a body: 1 GiB in all."""

SEND_TIMEOUT_S = 60.0
"""Default of `--send-timeout`: for a client to read what lies before it, when its connection's
buffers are full or its answer is complete."""

MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 60.0
MIN_BODY_BYTES_PER_S = 1024
"""Of a body, beyond the first `BODY_TIMEOUT_S`: one that drips comes to an end."""

MAX_UNFINISHED_BODIES = 32
"""So many bodies of the greatest length may be on their way, and more that are shorter."""

MAX_OTHER_BYTES = 2 << 20
"""Of all fields but prompt and messages: the ids of a large vocabulary fit."""

MAX_ID_CHARS = 128
"""Of the ids and the session that clients give: they go into headers and logs."""

MAX_CALL_ID_CHARS = 256
"""Of the ids that refer to something in the request, or to an earlier answer."""

# ------------------------------------------------------------------------- sequences of a request

DEFAULT_MAX_N = 128
"""Of a server; programs that use `LLM` may ask for `MAX_SEQUENCES`."""

MAX_SEQUENCES = 1024
DEFAULT_NUM_WAITING = 1024
"""Requests that may wait, beside those that run: some minutes of work, which is longer than most
clients wait."""

MAX_BEAMS = MAX_LOGPROBS // 2
"""Twice as many tokens are looked at behind each beam: half of them may end it."""

MAX_BEAMS_TOGETHER = 128
"""Of all prompts of a request. All of a step are sent at once: some milliseconds of the loop."""

MAX_LENGTH_PENALTY = 10.0
MAX_PRIORITY = 2**31 - 1
MAX_CACHE_SALT_CHARS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_BAD_WORD_CHARS = 256

# ------------------------------------------------------------------------------ prompts, messages

MAX_PROMPTS = 1024
MAX_DETOKENIZED = 1 << 20
MAX_VALUES = 4096
"""Messages, and parts of all their contents together, calls of tools included."""

MAX_ROLE_CHARS = 64
MAX_EXTRA_BYTES = 1 << 16
"""Length of `chat_template_kwargs`, and of all that messages hold besides texts."""

MAX_MESSAGE_DEPTH = 100
MAX_DOCUMENTS_BYTES = 2 << 20
MAX_TEMPLATE_CHARS = 1 << 18
"""The longest that models have are a tenth of that."""

MAX_RENDER_S = 5.0
"""A conversation renders in milliseconds; loops inside loops over a hostile one may not."""

MAX_RENDERED_CHARS = 32 << 20
MAX_TEMPLATE_BITS = 4096
"""Of a product or a power in a template: much larger ones take for ever."""


# ------------------------------------------------------------------------------------------ tools

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 1 << 20
MAX_TOOLS_VALUES = 1 << 16
"""Values in all schemas together, and about as many commas in their texts."""

MAX_TOOL_NAME_CHARS = 256
"""What is longer is no name, and need not be held any longer, when a model writes it."""

MAX_BOUND_NAME_CHARS = 64
MAX_TOOL_CHOICE_BYTES = 1 << 18
"""All tools that there may be, by their names."""

# ------------------------------------------------------------------------------ structured output

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64
"""Of brackets in brackets; a keyword such as `properties` takes two."""

MAX_SCHEMAS = 4096
MAX_PROPERTIES = 1000
MAX_ENUM = 1000
MAX_COUNT = 1 << 16
"""The largest minimum or maximum of a number of items, characters or properties."""

MAX_PATTERN_BYTES = 4 << 10
MAX_CHOICES = 1000
MAX_CHOICES_BYTES = 64 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_EBNF_BYTES = 16 << 10
"""The converter looks at all rules again for each that it finds to be a terminal."""

MAX_TAG_BYTES = 128 << 10
MAX_TAGS = 1000
MAX_TRIGGERS = 64
"""And of texts that are excluded: a text is searched for all of them."""

MAX_TAG_TEXT_CHARS = 4096
MAX_REPEATS = 1000
MAX_FORM_BYTES = 2 * MAX_SCHEMA_BYTES
"""Of `response_format` and the like, with all that is around the schema."""

# -------------------------------------------------------------------------------------- responses

MAX_TEXT_FIELD_BYTES = 1 << 20
MAX_INCLUDED = 64
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_NAME_CHARS = 512
"""Of `user` and the like."""

MAX_LISTED_ITEMS = 100
MAX_BACKGROUND_RUNS = 256
"""At one time, in one API server."""

DEFAULT_MAX_STORED_RESPONSES = 1000
MAX_STORED_RESPONSES = 1_000_000
"""Long before that the bound in bytes counts."""

MAX_STORED_BYTES = 64 << 20

# -------------------------------------------------------------------------------------- the table

TABLE: dict[str, tuple[Limit, ...]] = {
    "Connections and bodies": (
        Limit("header lines", MAX_HEAD_BYTES, "bytes", "with the URL: else 431"),
        Limit("header lines", HEAD_TIMEOUT_S, "seconds", "until they are there: else 408"),
        Limit("connections", MAX_CONNECTIONS, "", "of one API server: else 503"),
        Limit("answer", SEND_TIMEOUT_S, "seconds", "unread: else the connection is cut"),
        Limit("body", MAX_BODY_BYTES, "bytes", "refused while it is read: 413"),
        Limit("body", BODY_TIMEOUT_S, "seconds", "without any of it, or under 1 KiB a second: 408"),
        Limit(
            "unfinished bodies",
            MAX_UNFINISHED_BODIES * MAX_BODY_BYTES,
            "bytes",
            "of one API server: else 503",
        ),
        Limit("other fields", MAX_OTHER_BYTES, "bytes", "all but prompt, messages and the like"),
        Limit("x-request-id", MAX_ID_CHARS, "characters", "of A-Z a-z 0-9 ._:/=+@-: else ours"),
        Limit("x-session-id", MAX_ID_CHARS, "characters", "the same: else no session"),
        Limit("request_id", MAX_ID_CHARS, "characters", "the same"),
    ),
    "Sequences": (
        Limit("n", DEFAULT_MAX_N, "choices", "best_of too", 1, "--max-n"),
        Limit("n", MAX_SEQUENCES, "sequences", "prompts times n, or best_of"),
        Limit(
            "requests",
            DEFAULT_NUM_WAITING,
            "sequences",
            "besides those that run at once: else 503",
            flag="--max-num-queued-reqs",
        ),
        Limit("n", MAX_BEAMS, "beams", "with use_beam_search", 1),
        Limit("n", MAX_BEAMS_TOGETHER, "beams", "prompts times n"),
        Limit("length_penalty", MAX_LENGTH_PENALTY, "", "of beam search", -MAX_LENGTH_PENALTY),
        Limit("priority", MAX_PRIORITY, "", "the smallest is first", -MAX_PRIORITY),
        Limit("stream_interval", MAX_TOKEN_ID, "tokens", "in a chunk", 1),
        Limit("cache_salt", MAX_CACHE_SALT_CHARS, "characters", "", 1),
    ),
    "Sampling": (
        *SAMPLING,
        Limit("stop", MAX_STOP_STRINGS, "strings", "stop_sequences too"),
        Limit("stop", MAX_STOP_STRING_CHARS, "characters", "of a string", 1),
        Limit("bad_words", MAX_BAD_WORD_CHARS, "characters", "of a word", 1),
    ),
    "Prompts and messages": (
        Limit("prompt", MAX_PROMPTS, "prompts", "their tokens: the model's length"),
        Limit("tokens", MAX_DETOKENIZED, "token ids", "of /detokenize"),
        Limit("messages", MAX_VALUES, "values", "items too, and all of their parts and calls"),
        Limit("messages", MAX_EXTRA_BYTES, "bytes", "besides texts, ids and names"),
        Limit("messages", MAX_MESSAGE_DEPTH, "levels", "of what is no text"),
        Limit("role", MAX_ROLE_CHARS, "characters", "of a message", 1),
        Limit("ids", MAX_CALL_ID_CHARS, "characters", "of calls and items", 1),
        Limit("chat_template_kwargs", MAX_EXTRA_BYTES, "bytes", "names of arguments refused"),
        Limit("documents", MAX_DOCUMENTS_BYTES, "bytes", "of a chat"),
        Limit("chat_template", MAX_TEMPLATE_CHARS, "characters", "where clients bring one"),
        Limit("rendering", MAX_RENDER_S, "seconds", "of a chat template"),
        Limit("rendering", MAX_RENDERED_CHARS, "characters", "that a chat template writes"),
        Limit("rendering", MAX_TEMPLATE_BITS, "bits", "of a number that a chat template computes"),
    ),
    "Tools": (
        Limit("tools", MAX_TOOLS, "functions", "of a request"),
        Limit("tools", MAX_TOOLS_BYTES, "bytes", "all together"),
        Limit("tools", MAX_TOOLS_VALUES, "values", "in all schemas"),
        Limit("name", MAX_TOOL_NAME_CHARS, "characters", "of a tool", 1),
        Limit("name", MAX_BOUND_NAME_CHARS, "characters", "where calls are enforced", 1),
        Limit("tool_choice", MAX_TOOL_CHOICE_BYTES, "bytes", "of a response"),
    ),
    "Structured output": (
        Limit("a schema", MAX_SCHEMA_BYTES, "bytes", ""),
        Limit("a schema", MAX_SCHEMA_DEPTH, "brackets", "in brackets"),
        Limit("a schema", MAX_SCHEMAS, "schemas", "in it"),
        Limit("properties", MAX_PROPERTIES, "members", "of an object"),
        Limit("enum", MAX_ENUM, "values", ""),
        Limit("minLength and the like", MAX_COUNT, "", "lengths and numbers of items", 0),
        Limit("a regular expression", MAX_PATTERN_BYTES, "bytes", "pattern too"),
        Limit("choice", MAX_CHOICES, "texts", ""),
        Limit("choice", MAX_CHOICES_BYTES, "bytes", "all together"),
        Limit("a grammar", MAX_GRAMMAR_BYTES, "bytes", "in Lark"),
        Limit("a grammar", MAX_EBNF_BYTES, "bytes", "in EBNF"),
        Limit("a structural tag", MAX_TAG_BYTES, "bytes", ""),
        Limit("a structural tag", MAX_TAGS, "tags", "in each list"),
        Limit("a structural tag", MAX_TRIGGERS, "triggers", "and texts that are excluded"),
        Limit("a structural tag", MAX_TAG_TEXT_CHARS, "characters", "of a text in it"),
        Limit("a structural tag", MAX_REPEATS, "repetitions", "of a part"),
        Limit("response_format", MAX_FORM_BYTES, "bytes", "with what is around its schema"),
        *GRAMMARS,
    ),
    "/v1/responses": (
        Limit("text", MAX_TEXT_FIELD_BYTES, "bytes", ""),
        Limit("include", MAX_INCLUDED, "names", ""),
        Limit("metadata", MAX_METADATA, "pairs", ""),
        Limit("metadata", MAX_METADATA_KEY_CHARS, "characters", "of a key"),
        Limit("metadata", MAX_METADATA_VALUE_CHARS, "characters", "of a value"),
        Limit("user and the like", MAX_NAME_CHARS, "characters", ""),
        Limit("limit", MAX_LISTED_ITEMS, "items", "of one page", 1),
        Limit("background", MAX_BACKGROUND_RUNS, "responses", "of one API server: else 503"),
        Limit(
            "kept responses",
            DEFAULT_MAX_STORED_RESPONSES,
            "responses",
            "of one API server, the newest",
            flag="--max-stored-responses",
        ),
        Limit("kept responses", MAX_STORED_BYTES, "bytes", "the same"),
    ),
}
"""All bounds, by what they are about."""
