"""Lock-step ranks, API servers and a coordinator in one process, with messages that wait in links
until a test lets them arrive. For tests of `cluster/coordinator.py` and `engine/waves.py`.

Each link keeps its order; between links there is none. Ranks agree now and then whether anybody has
work: a rank that has put in its share waits, and reads nothing, until all have.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from cluster.coordinator import Coordinator, Start
from engine.waves import Share, Waves
from engine.wire import (
    EngineCoreOutputs,
    EngineDead,
    FirstRequest,
    LoadReport,
    SchedulerStats,
    StartWave,
)

Link = deque[Callable[[], None]]
"""Messages on their way, each as what its arrival does."""


@dataclass
class Request:
    steps_left: int
    wave: int
    is_refused: bool = False
    is_done: bool = False


@dataclass
class Rank:
    """One incarnation of a rank."""

    world: "World"
    index: int
    epoch: int
    waves: Waves = field(init=False)
    requests: list[Request] = field(default_factory=list)
    share: Share | None = None
    """Put in, while the others have not."""
    agreed: Share | None = None
    """What all have put in; the rank has not seen it yet."""
    to_coordinator: Link = field(default_factory=deque)
    ready: Link = field(default_factory=deque)
    """Another socket, so another order."""
    from_coordinator: Link = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.waves = Waves(self.index)
        self.ready.append(
            lambda: self.world.send(self.world.coordinator.take_ready(self.index, self.epoch))
        )

    @property
    def is_waiting(self) -> bool:
        return self.share is not None or self.agreed is not None

    def tell(self, **fields: int | None) -> None:
        stats = SchedulerStats(0, len(self.requests), 0.0)
        message = EngineCoreOutputs(self.index, self.epoch, stats=stats, **fields)  # type: ignore[arg-type]
        self.to_coordinator.append(
            lambda: self.world.send(self.world.coordinator.take_outputs(message))
        )

    def take_request(self, request: Request) -> None:
        if request.is_refused:
            request.is_done = True
            return
        self.requests.append(request)
        self.tell(start_wave=self.waves.take_request(request.wave))

    def can_step(self) -> bool:
        return self.agreed is not None or (self.waves.is_running and self.share is None)

    def step(self) -> None:
        """See what was agreed, or compute a step and put in a share."""
        if self.agreed is not None:
            agreed, self.agreed = self.agreed, None
            assert agreed.has_work or not self.requests
            self.tell(wave_complete=self.waves.take_agreement(agreed))
            return
        assert self.waves.needs_dummy_step(bool(self.requests)) != bool(self.requests)
        for request in self.requests:
            request.steps_left -= 1
            request.is_done = request.steps_left <= 0
        self.requests = [request for request in self.requests if not request.is_done]
        self.share = self.waves.share(bool(self.requests))
        self.world.agree()


@dataclass
class ApiServer:
    """Knows of waves what the latest report said."""

    world: "World"
    report: LoadReport = field(default_factory=lambda: LoadReport([]))
    to_coordinator: Link = field(default_factory=deque)
    from_coordinator: Link = field(default_factory=deque)
    to_ranks: dict[int, Link] = field(default_factory=dict)

    def send(self, request: Request, index: int) -> None:
        request.wave = self.report.wave
        link = self.to_ranks.setdefault(index, deque())
        link.append(lambda: self.world.ranks[index].take_request(request))
        if not self.report.is_running:
            first = FirstRequest(index, request.wave)
            self.to_coordinator.append(
                lambda: self.world.send(self.world.coordinator.take_first_request(first))
            )

    def take_report(self, report: LoadReport) -> None:
        self.report = report


class World:
    def __init__(self, num_ranks: int, num_api_servers: int) -> None:
        self.coordinator = Coordinator(num_ranks)
        self.now = 0.0
        self.ranks = [Rank(self, index, 0) for index in range(num_ranks)]
        self.gone: list[Rank] = []
        """Earlier incarnations, whose words may still be on their way."""
        self.api_servers = [ApiServer(self) for _ in range(num_api_servers)]
        self.sent: list[Request] = []

    # ------------------------------------------------------------------------- what may happen

    def links(self) -> list[Link]:
        """From which a message may arrive now."""
        return [link for link in self._readable_links() if link]

    def _readable_links(self) -> Iterator[Link]:
        for rank in [*self.gone, *self.ranks]:
            yield rank.to_coordinator
            yield rank.ready
        for rank in self.ranks:
            if not rank.is_waiting:
                yield rank.from_coordinator
        for api_server in self.api_servers:
            yield api_server.to_coordinator
            yield api_server.from_coordinator
            for index, link in sorted(api_server.to_ranks.items()):
                if not self.ranks[index].is_waiting:
                    yield link

    def request(self, api_server: int, rank: int, steps: int, is_refused: bool = False) -> Request:
        request = Request(steps, 0, is_refused)
        self.sent.append(request)
        self.api_servers[api_server].send(request, rank)
        return request

    def restart(self, index: int, has_last_words: bool) -> None:
        """A rank dies with the requests it has, and comes back. What it said may still arrive, what
        the coordinator said to it does not; API servers repeat what it had not read."""
        old = self.ranks[index]
        for request in old.requests:
            request.is_done = True
        if has_last_words:
            dead = EngineDead("ENGINE_CORE_DEAD", index, old.epoch, "test")
            old.to_coordinator.append(lambda: self.coordinator.take_dead(dead))
        self.gone.append(old)
        self.ranks[index] = Rank(self, index, old.epoch + 1)

    def publish(self, seconds: float) -> None:
        """Let time pass; a report goes out if one is due."""
        self.now += seconds
        report = self.coordinator.take_report(self.now)
        if report is not None:
            for api_server in self.api_servers:
                api_server.from_coordinator.append(partial(api_server.take_report, report))

    def come_to_rest(self) -> None:
        """Let everything arrive and every rank step until nothing is left to do."""
        for _ in range(10_000):
            for link in self.links():
                link.popleft()()
            for rank in self.ranks:
                if rank.can_step():
                    rank.step()
            if not self.links() and not any(rank.can_step() for rank in self.ranks):
                return
        raise AssertionError("it never comes to rest")

    # ------------------------------------------------------------------------------ how it works

    def send(self, starts: list[Start]) -> None:
        for index, epoch, message in starts:
            rank = self.ranks[index]
            if rank.epoch == epoch:  # else there is no route to it any more
                rank.from_coordinator.append(partial(_take_start, rank, message))

    def agree(self) -> None:
        shares = [rank.share for rank in self.ranks if rank.share is not None]
        if len(shares) == len(self.ranks):
            agreed = Share(
                any(share.has_work for share in shares), max(share.wave for share in shares)
            )
            for rank in self.ranks:
                rank.share, rank.agreed = None, agreed


def _take_start(rank: Rank, message: StartWave) -> None:
    rank.waves.take_start(message)
