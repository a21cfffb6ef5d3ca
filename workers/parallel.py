"""The ranks of one engine: who they are to each other, and the collectives between them.

    -tp 2 -pp 2      stage 0    stage 1        rank = pp_rank * tp_size + tp_rank
    tensor rank 0       0  -------> 2          down: an all-reduce after each row-split layer
    tensor rank 1       1  -------> 3          across: hidden states, to the same tensor rank

gloo on CPU, NCCL on GPU. Between stages a send returns at once, so that a stage begins its next
step while the following one works on this.
"""

import datetime
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config import ParallelConfig
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in its engine."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int

    @classmethod
    def of(cls, rank: int, config: ParallelConfig) -> "Place":
        tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size)

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_output(self) -> bool:
        """The rank that samples and replies: `ParallelConfig.output_rank`."""
        return self.is_last_stage and self.tp_rank == 0


class Parallel:
    """Collectives of one rank. With a single rank they do nothing, and no group exists.

    Args:
        place: where this rank is.
        rendezvous: a file path that all ranks of the engine share, and nothing has used before.
        device: where the tensors are.
        timeout_s: a collective that takes longer has failed.
    """

    def __init__(
        self, place: Place, rendezvous: str, device: torch.device, timeout_s: float
    ) -> None:
        self.place = place
        self._device = device
        self._tp_group: dist.ProcessGroup | None = None
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        if place.tp_size * place.pp_size > 1:
            self._connect(rendezvous, device, datetime.timedelta(seconds=timeout_s))

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum over tensor ranks, on each of them. Overwrites `partial`."""
        if self._tp_group is not None:
            dist.all_reduce(partial, group=self._tp_group)
        return partial

    def gather(self, part: Tensor) -> Tensor | None:
        """Return the parts of all tensor ranks side by side on the first of them, None on the
        others."""
        if self._tp_group is None:
            return part
        is_first = self.place.tp_rank == 0
        parts = [torch.empty_like(part) for _ in range(self.place.tp_size)] if is_first else None
        dist.gather(part.contiguous(), parts, group_dst=0, group=self._tp_group)
        return torch.cat(parts, dim=-1) if parts is not None else None

    def all_agree(self, says_yes: bool) -> bool:
        """Return whether all ranks say yes. All of them must call."""
        if self.place.tp_size * self.place.pp_size == 1:
            return says_yes
        votes = torch.tensor(int(says_yes), device=self._device)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage, and return before they have arrived."""
        hidden = hidden.contiguous()
        work = dist.isend(hidden, dst=dist.get_rank() + self.place.tp_size)
        assert work is not None  # None only for ranks outside the group
        self._sends.append((work, hidden))  # the memory must stay until it has gone
        # This stage is at most as many steps ahead as there are stages, so the oldest has gone.
        if len(self._sends) > self.place.pp_size:
            self._sends.popleft()[0].wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the hidden states that the previous stage has for this step."""
        hidden = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(hidden, src=dist.get_rank() - self.place.tp_size)
        return hidden

    def close(self) -> None:
        """Leave the groups. Idempotent."""
        self._sends.clear()
        if dist.is_initialized() and self.place.tp_size * self.place.pp_size > 1:
            dist.destroy_process_group()

    def _connect(self, rendezvous: str, device: torch.device, timeout: datetime.timedelta) -> None:
        place = self.place
        world_size = place.tp_size * place.pp_size
        rank = place.pp_rank * place.tp_size + place.tp_rank
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.FileStore(rendezvous, world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if is_cuda else None,
        )
        if place.tp_size > 1:
            # Everyone takes part in making every group, also of those it is not in.
            for stage in range(place.pp_size):
                first = stage * place.tp_size
                ranks = list(range(first, first + place.tp_size))
                group = dist.new_group(ranks, timeout=timeout)
                if stage == place.pp_rank:
                    self._tp_group = group


def divide(total: int, parts: int, what: str) -> int:
    """Return `total / parts`.

    Raises:
        ConfigError: it does not divide; `what` says of what.
    """
    if total % parts:
        raise ConfigError(
            f"--tensor-parallel-size {parts} does not divide the model's {total} {what}"
        )
    return total // parts
