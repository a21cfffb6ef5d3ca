"""Runs one part of a soak run: load and faults on one kind of server, and all oracles.

start, twins, a while of load     what it takes then is the baseline
load, with a fault an interval
silence                           gauges are zero, and the baseline is back
stop                              exit code 0, and nothing is left
"""

import logging
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cluster.chaos.plan import Fault
from tests.helpers.server import wait_for
from tests.soak.exchange import Exchange
from tests.soak.faults import Dealt, deal
from tests.soak.load import Load, make_twins
from tests.soak.parts import Part
from tests.soak.service import Service
from tests.soak.watch import QUICK_S, Watch, footprints, grown

logger = logging.getLogger(__name__)

WARM_UP_S = 20.0
SILENCE_S = 10.0


@dataclass(slots=True)
class Outcome:
    """Of a part."""

    part: Part
    faults: list[Dealt] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    num_compared: int = 0
    num_tokens: int = 0
    num_starts: int = 0
    wall_s: float = 0.0
    slowest_probe_s: float = 0.0
    complaints: list[str] = field(default_factory=list)

    def excused(self) -> list[Exchange]:
        """Requests that failed, and may have: their server, or its process, was killed."""
        return [each for each in self.failed() if self._is_excused(each)]

    def failed(self) -> list[Exchange]:
        return [each for each in self.exchanges if each.end in ("error", "broken", "down")]

    def _is_excused(self, exchange: Exchange) -> bool:
        return any(fault.excuses(exchange, self.part.mode) for fault in self.faults)

    def calm_gap_s(self) -> float:
        """The longest gap in a stream that no fault concerns."""
        calm = [
            each
            for each in self.exchanges
            if not any(fault.concerns(each) for fault in self.faults)
        ]
        return max((gap for each in calm for _, gap in each.gaps), default=0.0)


def run_part(part: Part, seed: int, plan: list[Fault], duration_s: float, logs: Path) -> Outcome:
    """Run one part.

    Args:
        part: which.
        seed: of requests.
        plan: of faults.
        duration_s: of the load with faults.
        logs: the servers' go below here.
    """
    outcome = Outcome(part)
    logs.mkdir(parents=True, exist_ok=True)
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        service = Service(part.make_model(Path(folder)), part.flags, part.env, logs)
        try:
            with service:
                _run(service, outcome, plan, seed, duration_s)
        except (AssertionError, OSError, httpx.HTTPError) as error:
            # Later parts may still have something to say.
            outcome.complaints.append(f"{type(error).__name__}: {error}"[:4000])
        outcome.num_starts = service.num_starts
    outcome.wall_s = time.monotonic() - began_at
    for exchange in outcome.failed():
        if exchange not in outcome.excused():
            outcome.complaints.append(_failure(exchange, began_at))
    return outcome


def _failure(exchange: Exchange, began_at: float) -> str:
    return (
        f"{exchange.case.name} failed without an excuse at"
        f" {exchange.began_at - began_at:.1f}…{exchange.ended_at - began_at:.1f} s:"
        f" {exchange.end}, {exchange.why}"
    )


def _run(
    service: Service, outcome: Outcome, plan: list[Fault], seed: int, duration_s: float
) -> None:
    part = outcome.part
    cases = part.make_cases(seed)
    twins = make_twins(service.url, cases, part)
    watch = Watch(service.url)

    def make_load(order: int) -> Load:
        return Load(service.url, cases, twins, order, part)

    warm_up = make_load(seed + 1)
    warm_up.start()
    time.sleep(min(WARM_UP_S, duration_s / 4))
    _end(warm_up, watch, outcome)
    baseline = footprints(service.server.process.pid)

    load = make_load(seed)
    watch.start()
    load.start()
    try:
        _deal_all(service, outcome, plan, watch, duration_s)
    finally:
        try:
            _end(load, watch, outcome)
        finally:
            watch.stop()
    after = footprints(service.server.process.pid)
    outcome.complaints += grown(baseline, after)
    outcome.complaints += [f"a counter has shrunk: {each}" for each in watch.shrunk[:20]]
    outcome.slowest_probe_s = watch.slowest_probe_s
    if watch.slowest_probe_s > QUICK_S:
        outcome.complaints.append(f"a probe took {watch.slowest_probe_s:.1f} s")


def _end(load: Load, watch: Watch, outcome: Outcome) -> None:
    """No more requests: all are answered, and then nothing is in use any more."""
    load.stop()
    outcome.exchanges += load.exchanges
    outcome.num_compared += load.counts["compared"]
    outcome.num_tokens += load.num_tokens
    outcome.complaints += load.wrong[:50]
    if len(load.wrong) > 50:
        outcome.complaints.append(f"and {len(load.wrong) - 50} more wrong answers")
    wait_for(lambda: not watch.busy_gauges(), "gauges are zero without requests", SILENCE_S, 0.5)


def _deal_all(
    service: Service, outcome: Outcome, plan: list[Fault], watch: Watch, duration_s: float
) -> None:
    began_at = time.monotonic()
    for fault in plan:
        time.sleep(max(0.0, began_at + fault.at_s - time.monotonic()))
        watch.is_probing = False
        ends_server = outcome.part.mode == "exit" and fault.kind.action != "pause"
        if ends_server:
            watch.is_counting = False
        dealt = deal(service, fault, outcome.part.mode, outcome.part.noticed_s)
        if ends_server:
            watch.forget()
        outcome.faults.append(dealt)
        outcome.complaints += dealt.complaints
        watch.is_probing = True
    time.sleep(max(0.0, began_at + duration_s - time.monotonic()))
