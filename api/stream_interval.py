"""Streams in larger pieces: `stream_interval`. Used by `answer` in place of a plain
`Generation`."""

from dataclasses import dataclass, field

from api.generate import Batch, Choice, Generation
from api.output_processor import OutputDelta, merge_deltas


class SpacedGeneration(Generation):
    """Shows the first tokens of each choice at once, then so many together, and the last at once.

    Args:
        interval: tokens that are shown together.
    """

    def __init__(self, interval: int) -> None:
        super().__init__()
        self._interval = interval
        self._held: dict[Choice, _Held] = {}
        """Of choices that have shown their first tokens."""

    def _take(self) -> Batch:
        batch = super()._take()
        if self._failure is not None:
            return [*batch, *self._release()]
        return [(choice, shown) for choice, new in batch if (shown := self._space(choice, new))]

    def _space(self, choice: Choice, delta: OutputDelta) -> OutputDelta | None:
        """What is shown now of a choice with that news."""
        if choice not in self._held and delta.token_ids:
            self._held[choice] = _Held()
            return delta
        held = self._held.setdefault(choice, _Held())
        held.deltas.append(delta)
        held.num_tokens += len(delta.token_ids)
        if held.num_tokens < self._interval and delta.finish_reason is None:
            return None
        self._held[choice] = _Held()
        return merge_deltas(held.deltas)

    def _release(self) -> Batch:
        """All that is held: nothing more will come."""
        held, self._held = self._held, {}
        return [(choice, merge_deltas(each.deltas)) for choice, each in held.items() if each.deltas]


@dataclass(slots=True)
class _Held:
    """What has not been shown yet of one choice."""

    deltas: list[OutputDelta] = field(default_factory=list)
    num_tokens: int = 0
    """Of all of them; adding them up each time would take long where the interval is."""
