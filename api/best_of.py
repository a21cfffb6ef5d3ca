"""The likeliest of several continuations: `best_of`. Used by `answer` in place of a plain
`Generation`; never for streams, since which are the best shows at the end."""

from collections.abc import Sequence

from api.generate import Batch, Choice, Generation
from api.output_processor import OutputDelta, merge_deltas


class BestOf(Generation):
    """Makes several continuations of each prompt, and shows the best.

    As in OpenAI's reference, the best have the highest log probability per token, and all count as
    completion tokens. Their parameters ask for log probabilities.

    Args:
        n: to be shown of each prompt, best first.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self._num_shown = n
        self._deltas: dict[Choice, list[OutputDelta]] = {}

    @property
    def num_choices(self) -> int:
        return len(self.choices) // self._n * self._num_shown

    def _take(self) -> Batch:
        """Nothing until all have ended."""
        for choice, delta in super()._take():
            self._deltas.setdefault(choice, []).append(delta)
        if self._running or self._failure is not None or not self._deltas:
            return ()
        whole = {choice: merge_deltas(deltas) for choice, deltas in self._deltas.items()}
        self._deltas = {}
        return [
            best
            for first in range(0, len(self.choices), self._n)
            for best in self._best(self.choices[first : first + self._n], whole)
        ]

    def _best(self, choices: Sequence[Choice], whole: dict[Choice, OutputDelta]) -> Batch:
        """The best continuations of one prompt, numbered as they are shown."""
        ranked = sorted(choices, key=lambda choice: -_mean_logprob(whole[choice]))
        first_index = choices[0].index // self._n * self._num_shown
        shown = ranked[: self._num_shown]
        for place, choice in enumerate(shown):
            choice.index = first_index + place
        return [(choice, whole[choice]) for choice in shown]


def _mean_logprob(delta: OutputDelta) -> float:
    logprobs = delta.logprobs or []
    return sum(position.chosen.logprob for position in logprobs) / max(1, len(logprobs))
