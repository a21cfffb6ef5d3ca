"""Streams in larger pieces: `stream_interval`. Used by `answer` in place of a plain
`Generation`."""

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
        self._held: dict[Choice, list[OutputDelta]] = {}
        """Of choices that have shown their first tokens."""

    def _take(self) -> Batch:
        batch = super()._take()
        if self._failure is not None:
            return [*batch, *self._release()]
        return [(choice, shown) for choice, new in batch if (shown := self._space(choice, new))]

    def _space(self, choice: Choice, delta: OutputDelta) -> OutputDelta | None:
        """What is shown now of a choice with that news."""
        if choice not in self._held and delta.token_ids:
            self._held[choice] = []
            return delta
        held = self._held.setdefault(choice, [])
        held.append(delta)
        num_tokens = sum(len(each.token_ids) for each in held)
        if num_tokens < self._interval and delta.finish_reason is None:
            return None
        self._held[choice] = []
        return merge_deltas(held)

    def _release(self) -> Batch:
        """All that is held: nothing more will come."""
        held, self._held = self._held, {}
        return [(choice, merge_deltas(deltas)) for choice, deltas in held.items() if deltas]
