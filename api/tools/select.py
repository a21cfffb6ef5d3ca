"""Which family a model belongs to: told by a flag, or by the markers in its chat template.

A template shows the model its own earlier calls, so it holds their markers. Used when a model is
loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from api.ids import new_id
from api.tools import deepseek, gemma, hermes, llama, mistral, plain, pythonic, qwen_coder
from api.tools.base import Scan, ScanningParser, ToolParser, Tools
from api.tools.binding import WriteCalls

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Family:
    """Models that write their calls in one way."""

    scan: Scan
    write_calls: WriteCalls
    """How it writes calls, for the grammar of those that must be made."""

    markers: tuple[str, ...]
    """What the scanner must see, also where it is a special token."""

    starts: tuple[str, ...] = ()
    """Which of these say that a call begins, and nothing else."""

    has_short_ids: bool = False
    """Ids of calls have nine letters or digits: the template insists."""

    def parser(self, tools: Tools) -> ToolParser:
        return ScanningParser(self.scan, tools)

    def new_call_id(self) -> str:
        return new_id(num_bits=36) if self.has_short_ids else new_id("call_")


HERMES = Family(hermes.scan, hermes.write_calls, hermes.MARKERS, (hermes.START,))
QWEN_CODER = Family(
    qwen_coder.scan, qwen_coder.write_calls, qwen_coder.MARKERS, (qwen_coder.START,)
)
LLAMA = Family(llama.scan, llama.write_calls, llama.TAGS)
MISTRAL = Family(
    mistral.scan, mistral.write_list, mistral.MARKERS, (mistral.START,), has_short_ids=True
)
NEW_MISTRAL = replace(MISTRAL, write_calls=mistral.write_calls)
FUNCTION_GEMMA = Family(
    gemma.scan_function_gemma,
    gemma.write_calls(gemma.FUNCTION_GEMMA),
    gemma.FUNCTION_GEMMA.markers,
    (gemma.FUNCTION_GEMMA.start,),
)
GEMMA_4 = Family(
    gemma.scan_gemma_4,
    gemma.write_calls(gemma.GEMMA_4),
    gemma.GEMMA_4.markers,
    (gemma.GEMMA_4.start,),
)
PYTHONIC = Family(pythonic.scan, pythonic.write_calls, pythonic.MARKERS, pythonic.STARTS)
LLAMA_4_PYTHONIC, LFM2 = (
    replace(PYTHONIC, write_calls=pythonic.write_marked(start, end))
    for start, end in zip(pythonic.STARTS, pythonic.ENDS, strict=True)
)
DEEPSEEK = Family(
    deepseek.scan, deepseek.write_calls, deepseek.MARKERS, (deepseek.FIRST, deepseek.START)
)
OLD_DEEPSEEK = replace(DEEPSEEK, write_calls=deepseek.write_fenced)
PLAIN = Family(plain.scan, plain.write_calls, ())
"""Where nobody knows how a model calls tools, and it has to."""

FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": OLD_DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA_4,
    "hermes": HERMES,
    "lfm2": LFM2,
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "llama4_pythonic": LLAMA_4_PYTHONIC,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN_CODER,
    "qwen3_xml": QWEN_CODER,
}
"""By the names that vLLM's `--tool-call-parser` has for them."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("deepseek_v31", (deepseek.START, f"['name'] + '{deepseek.SEPARATOR}'")),
    ("deepseek_v3", (deepseek.START,)),
    ("gemma4", (gemma.GEMMA_4.start,)),
    ("functiongemma", (gemma.FUNCTION_GEMMA.start,)),
    ("mistral", (mistral.START,)),
    ("qwen3_coder", (qwen_coder.START, qwen_coder.FUNCTION)),
    ("hermes", (hermes.START, "arguments")),
    ("lfm2", (pythonic.STARTS[1],)),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ('"parameters": dictionary of argument name',)),
    ("llama3_json", (llama.TAGS[0],)),
)
"""The first family of whose signs the template has all."""

_VARIANTS: Mapping[str, tuple[str, Family]] = {
    "mistral": (mistral.ARGUMENTS, NEW_MISTRAL),
    "pythonic": (pythonic.STARTS[0], LLAMA_4_PYTHONIC),
}
"""A sign in the template, and how it is written then."""

_OTHERS = ("<arg_key>",)
"""Signs of families that we cannot read, and that share markers with one that we can."""


def choose(name: str, template: str | None) -> tuple[str, Family] | None:
    """The family of a model, and its name.

    Args:
        name: of a family, or "auto".
        template: the chat template that is used with tools.

    Returns:
        None: the template has no markers that we know.
    """
    found = detect(template or "") if name == AUTO else name
    if found is None:
        return None
    sign, variant = _VARIANTS.get(found, ("", FAMILIES[found]))
    return found, variant if sign in (template or "") else FAMILIES[found]


def detect(template: str) -> str | None:
    """The name of the family whose markers a template has."""
    if any(sign in template for sign in _OTHERS):
        return None
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return name
    return None
