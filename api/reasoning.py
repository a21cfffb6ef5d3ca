"""What a model thinks, apart from what it says: `<think>…</think>` at the beginning of an answer.

Many templates end with the opening marker themselves, so that the answer begins inside; others end
with an empty block, so that the model does not think at all. So the prompt is what tells where an
answer begins, whatever the request says about thinking. Pure; used by `message_parser`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from api.tools.reader import Reader, Steps, Write

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """Models that mark their thoughts in one way."""

    start: str
    end: str
    is_always_open: bool = False
    """The answer begins with a thought, unless the prompt has closed it: such models think without
    an opening marker."""

    def is_open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins inside a thought."""
        prompt = prompt.rstrip()
        if self.is_always_open:
            return not prompt.endswith(self.end)
        return prompt.endswith(self.start)

    def may_open_after(self, prompt: str) -> bool:
        """Whether an answer to this prompt may begin with a thought, or inside one: not where the
        prompt ends with a thought that is closed, so that the model does not think."""
        return not prompt.rstrip().endswith(self.end)

    def is_open_in(self, beginning: str) -> bool:
        """Whether the beginning of an answer, which the model is to continue, is a thought."""
        thought = beginning.rpartition(self.start)[2] if self.start in beginning else None
        return thought is not None and self.end not in thought


_THINK = ReasoningFamily("<think>", "</think>")

FAMILIES: Mapping[str, ReasoningFamily] = {
    "deepseek_r1": ReasoningFamily("<think>", "</think>", is_always_open=True),
    "deepseek_v3": _THINK,
    "gemma4": ReasoningFamily("<|channel>thought", "<channel|>"),
    "glm45": _THINK,
    "mistral": ReasoningFamily("[THINK]", "[/THINK]"),
    "qwen3": _THINK,
    "seed_oss": ReasoningFamily("<seed:think>", "</seed:think>"),
}
"""By the names that vLLM's `--reasoning-parser` has for them."""

_DETECTED = ("qwen3", "mistral", "seed_oss", "gemma4")
"""One for each pair of markers."""


def choose(name: str, template: str | None) -> ReasoningFamily | None:
    """The family of a model.

    Args:
        name: of a family, or "auto": the one whose closing marker the chat template has.
        template: the chat template.

    Returns:
        None: there are no markers that we know.
    """
    if name != AUTO:
        return FAMILIES[name]
    found = (FAMILIES[each] for each in _DETECTED if FAMILIES[each].end in (template or ""))
    return next(found, None)


class ReasoningSink(Protocol):
    """Takes an answer apart."""

    def reasoning(self, piece: str) -> None:
        """A piece of a thought."""

    def content(self, piece: str) -> None:
        """A piece of all the rest."""


def scan(
    reader: Reader,
    sink: ReasoningSink,
    family: ReasoningFamily,
    *,
    is_open: bool,
    also_ended_by: Sequence[str] = (),
) -> Steps[None]:
    """Split an answer. White space next to the markers is left out.

    Args:
        reader: the answer.
        sink: takes the parts.
        family: of the model.
        is_open: it begins inside a thought.
        also_ended_by: markers of a tool call: some models begin one in the middle of a thought.
    """
    reader.record()
    yield from reader.peek_past_space()
    has_start = yield from reader.skips(family.start)
    space = reader.recorded()
    if has_start or is_open:
        yield from _scan_thought(reader, sink, (family.end, *also_ended_by))
        yield from reader.skips(family.end)
        yield from reader.peek_past_space()
    else:
        sink.content(space)
    yield from reader.pass_rest(sink.content)


def _scan_thought(reader: Reader, sink: ReasoningSink, ends: tuple[str, ...]) -> Steps[None]:
    yield from reader.peek_past_space()
    yield from reader.until(ends, _Trimmed(sink.reasoning).write)


class _Trimmed:
    """Passes a text on without the white space at its end."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._space = ""

    def write(self, piece: str) -> None:
        kept = piece.rstrip()
        if kept:
            self._write(self._space + kept)
            self._space = piece[len(kept) :]
        else:
            self._space += piece
