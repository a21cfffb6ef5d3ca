"""Drives workers by hand: writes the plans an engine core would, without an engine core.

    driver = PlanDriver(worker.execute_model, block_size=4, num_blocks=100)
    tokens = driver.run([Sequence("a", prompt, num_tokens=12)], chunk=5)

Blocks are handed out in a shuffled order, so that no test passes because pages happen to lie side
by side.
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from engine.codec import pack_tokens, token_array
from engine.sampling_params import SamplingParams
from engine.step import ContinuedRequests, ModelRunnerOutput, NewRequest, SchedulerOutput
from engine.wire import Logprobs

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

Execute = Callable[[SchedulerOutput], ModelRunnerOutput | None]


@dataclass
class Sequence:
    """A request and what has come of it."""

    request_id: str
    prompt: list[int]
    num_tokens: int = 12
    """Wanted."""
    params: SamplingParams = GREEDY
    output: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_known: bool = False
    """To the workers."""
    num_sent: int = 0
    """Of its tokens, to the workers."""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        return len(self.output) >= self.num_tokens


class PlanDriver:
    """Schedules first come, first served, within a budget of tokens and a number of rows."""

    def __init__(
        self, execute: Execute, *, block_size: int = 4, num_blocks: int = 600, max_seqs: int = 64
    ) -> None:
        self._execute = execute
        self._block_size = block_size
        self._max_seqs = max_seqs
        self._free = list(range(num_blocks))
        random.Random(23).shuffle(self._free)
        self._dropped: list[str] = []
        self.num_steps = 0

    def run(
        self,
        sequences: list[Sequence],
        *,
        chunk: int = 1 << 30,
        budget: int = 256,
        arrivals_per_step: int = 1 << 30,
        preempt_at: Collection[int] = (),
    ) -> list[list[int]]:
        """Run all of them to their end, and return their outputs.

        Args:
            chunk: most prompt tokens of a request in one step.
            budget: most tokens in one step.
            arrivals_per_step: so many requests join in each step.
            preempt_at: steps before which the first running request loses its blocks.
        """
        waiting, running = list(sequences), list[Sequence]()
        step = 0
        while waiting or running:
            step += 1
            if step in preempt_at and running:
                waiting.insert(0, self.preempt(running.pop(0)))
            for _ in range(min(arrivals_per_step, len(waiting), self._max_seqs - len(running))):
                running.append(waiting.pop(0))
            self.step(running, chunk=chunk, budget=budget)
            for sequence in [s for s in running if s.is_done]:
                running.remove(sequence)
                self.drop(sequence)
        self.step([])
        return [sequence.output for sequence in sequences]

    def step(self, sequences: list[Sequence], *, chunk: int = 1 << 30, budget: int = 256) -> None:
        """Run one step of these requests, as far as the budget goes."""
        plan = self.plan(sequences, chunk=chunk, budget=budget)
        output = self._execute(plan)
        assert output is not None, "the driver talks to the rank that replies"
        self.take(output, {s.request_id: s for s in sequences})

    def plan(
        self, sequences: list[Sequence], *, chunk: int = 1 << 30, budget: int = 256
    ) -> SchedulerOutput:
        """Write the next plan."""
        scheduled: dict[str, int] = {}
        new, old = list[NewRequest](), list[tuple[str, int, bytes, list[int]]]()
        for sequence in sequences:
            num_tokens = min(len(sequence.token_ids) - sequence.num_computed, chunk, budget)
            if num_tokens <= 0:
                continue
            budget -= num_tokens
            scheduled[sequence.request_id] = num_tokens
            new_blocks = self._grow(sequence, sequence.num_computed + num_tokens)
            if sequence.is_known:
                unsent = pack_tokens(sequence.token_ids[sequence.num_sent :])
                old.append((sequence.request_id, sequence.num_computed, unsent, new_blocks))
            else:
                new.append(_new_request(sequence))
            sequence.is_known, sequence.num_sent = True, len(sequence.token_ids)
            sequence.num_computed += num_tokens
        dropped, self._dropped = self._dropped, []
        self.num_steps += 1
        columns = [list(column) for column in zip(*old, strict=True)] if old else [[], [], [], []]
        return SchedulerOutput(self.num_steps, scheduled, new, ContinuedRequests(*columns), dropped)

    def take(self, output: ModelRunnerOutput, by_id: dict[str, Sequence]) -> None:
        """Append what was sampled."""
        for request_id, token_id in zip(
            output.request_ids, output.sampled_token_ids.tolist(), strict=True
        ):
            by_id[request_id].output.append(token_id)
        for request_id, logprobs in output.logprobs.items():
            by_id[request_id].logprobs.append(logprobs)
        for request_id, logprobs in output.prompt_logprobs.items():
            by_id[request_id].prompt_logprobs.append(logprobs)

    def preempt(self, sequence: Sequence) -> Sequence:
        """Take a request's blocks away; it is computed again when it is next scheduled."""
        self.drop(sequence)
        sequence.is_known, sequence.num_computed = False, 0
        return sequence

    def drop(self, sequence: Sequence) -> None:
        """Take a request out of the workers' batch with the next plan, and its blocks at once."""
        self._dropped.append(sequence.request_id)
        self._free.extend(sequence.block_ids)
        sequence.block_ids = []

    def forget(self, sequence: Sequence, num_shared: int) -> None:
        """Drop a request whose first blocks are another's."""
        sequence.block_ids = sequence.block_ids[num_shared:]
        self.drop(sequence)

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // self._block_size) - len(sequence.block_ids)
        new_blocks = [self._free.pop(0) for _ in range(missing)]
        sequence.block_ids.extend(new_blocks)
        return new_blocks


def _new_request(sequence: Sequence) -> NewRequest:
    return NewRequest(
        request_id=sequence.request_id,
        token_ids=token_array(sequence.token_ids),
        num_prompt_tokens=len(sequence.prompt),
        num_computed_tokens=sequence.num_computed,
        block_ids=list(sequence.block_ids),
        sampling_params=sequence.params,
    )
