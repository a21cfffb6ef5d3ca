"""A lock-step rank's share of waves and dummy steps. Pure: messages in, messages out.

Ranks of a model whose experts are spread over them step together: each takes part in every step of
the others, with a dummy batch where it has no work. A wave is a stretch of such steps:

    paused at wave w  --a request, or START_DP_WAVE-->  running wave w
    running wave w    --nobody has work----------------->  paused at wave w + 1

Who gets a request while it is paused starts by itself and says so (`start_wave`); the coordinator
starts the others. So no request waits for anybody's word, and what the coordinator and the API
servers believe of the waves may be late without harm. That nobody has work is agreed between the
ranks now and then (an all-reduce of `Share`, each the maximum), and then all of them pause
after the same step.

NOTE: ranks of a dense model are independent. They step when they have work and use none of this.
"""

from typing import NamedTuple

from engine.wire import StartWave


class Share(NamedTuple):
    """What a rank puts into an agreement, and what comes out: the maximum of each over all."""

    has_work: bool
    wave: int


class Waves:
    """One rank's view. It changes through messages, which a rank that waits for the others does not
    read: they come after the agreement."""

    def __init__(self, engine_index: int) -> None:
        self.current_wave = 0
        """The wave under way, or the next one."""
        self.is_running = False
        self._engine_index = engine_index

    def take_request(self, wave: int) -> int | None:
        """A request has come, sent in what its API server took for the current wave.

        Returns:
            The wave to announce to the coordinator (`EngineCoreOutputs.start_wave`), if the rank
            has just started it.
        """
        self.current_wave = max(self.current_wave, wave)
        if self.is_running:
            return None
        self.is_running = True
        return self.current_wave

    def take_start(self, start: StartWave) -> None:
        """START_DP_WAVE has come. It may come twice, or after the wave is over."""
        if start.exclude_engine != self._engine_index and start.wave >= self.current_wave:
            self.current_wave = start.wave
            self.is_running = True

    def needs_dummy_step(self, has_work: bool) -> bool:
        """Whether the others step and need this rank with them, though it has no work."""
        return self.is_running and not has_work

    def share(self, has_work: bool) -> Share:
        """What to put into an agreement."""
        return Share(has_work, self.current_wave)

    def take_agreement(self, agreed: Share) -> int | None:
        """All ranks have put in their shares; `agreed` is the same for all of them.

        Returns:
            The wave that is over, for the coordinator (`EngineCoreOutputs.wave_complete`); None
            while it goes on.
        """
        # The highest: a rank that has been restarted may have begun before it knew the number.
        self.current_wave = agreed.wave
        if agreed.has_work:
            return None
        self.current_wave += 1
        self.is_running = False
        return agreed.wave
