"""A StructuredOutput as llguidance reads it: one JSON text that holds grammars.

Used by `compiler` and by `check_process`, so that both compile the same. So both take
the library's own limits from here, too.
"""

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from engine.limits import MAX_GRAMMAR_SYMBOLS, MAX_LEXER_STATES
from engine.structured_output import StructuredOutput

MAX_CHOICES = 4096

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between JSON's tokens, unless a schema's own `x-guidance` says otherwise. Bounded, because small
models, once they have begun, may put white space there for ever; 40 is ten levels of
indentation."""

# A grammar that forces bytes is by default tokenized by the library, which then needs a whole
# tokenizer (on 262,144 tokens 350 MiB and 5 s), and masks all but one token. Without that the model
# chooses among all tokens that go on with those bytes. One grammar that says so is enough for all.
_NO_FORCING = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: "x"'}


def limits() -> LLParserLimits:
    """How complex a grammar and one of its masks may be. Beyond, a matcher is in error."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        verbose_errors=False,
    )


def grammar_of(output: StructuredOutput) -> str:
    """Return the grammar of `output`, not compiled yet.

    Raises:
        ValueError: it is no such description at all.
    """
    try:
        grammar = json.loads(_grammar_of(output))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    grammar["grammars"].append(_NO_FORCING)
    return json.dumps(grammar)


def _grammar_of(output: StructuredOutput) -> str:
    match output.kind:
        case "json_schema":
            schema = "{}" if output.spec.strip() == "true" else output.spec
            return LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": _WHITESPACE}
            )
        case "regex":
            return LLMatcher.grammar_from_regex(output.spec)
        case "choice":
            return _lark(_choice(output.spec))
        case "lark":
            return _lark(output.spec)


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _choice(spec: str) -> str:
    """One of some texts, as a terminal: strings of Lark are JSON's."""
    choices: Any = json.loads(spec)
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise ValueError("a JSON array of texts is wanted")
    if not choices or len(choices) > MAX_CHOICES:
        raise ValueError(f"1 to {MAX_CHOICES} texts are possible, not {len(choices)}")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in choices)
