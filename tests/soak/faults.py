"""Deals out faults, and sees to what they may do and what they may not."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from api.chaos import PAUSE_S, Kind, choose, strike
from cluster.chaos.plan import Fault
from tests.helpers.server import wait_for
from tests.soak.exchange import Exchange
from tests.soak.parts import Mode
from tests.soak.service import Service

logger = logging.getLogger(__name__)

BACK_S = 180.0
"""And all is as before by then, on two cores and under load."""
AFTER_S = 1.0
"""So much later clients may still hear of it."""


@dataclass(slots=True)
class Dealt:
    """A fault that was dealt. Times are of `time.monotonic`."""

    kind: Kind
    title: str
    """Of the process."""
    at: float
    back_at: float = 0.0
    complaints: list[str] = field(default_factory=list)

    @property
    def back_after_s(self) -> float:
        return self.back_at - self.at

    def concerns(self, exchange: Exchange) -> bool:
        """Whether they overlap in time."""
        return exchange.began_at <= self.back_at + AFTER_S and exchange.ended_at >= self.at

    def excuses(self, exchange: Exchange, mode: Mode) -> bool:
        """Whether a request may have failed for it."""
        if self.kind.action == "pause" or not self.concerns(exchange):
            return False
        # A connection cannot outlive its server. Everything else goes on, where ranks are replaced.
        return mode == "exit" or (self.kind.role == "api-server" and exchange.end == "broken")

    def gaps(self, exchange: Exchange) -> Iterator[float]:
        """Those of a stream that began before all was as before, and ended after the fault."""
        for began_at, gap_s in exchange.gaps:
            if began_at <= self.back_at + AFTER_S and began_at + gap_s >= self.at:
                yield gap_s


def deal(service: Service, fault: Fault, mode: Mode, noticed_s: float) -> Dealt:
    """Deal a fault, and wait until all is as it was before.

    Args:
        service: whose processes.
        fault: what to do.
        mode: what the server does then.
        noticed_s: whatever hangs has been noticed by then.

    Raises:
        AssertionError: it does not become so.
    """
    before = service.processes()
    titles = {process.title for process in before}
    process = choose(before, fault.kind.role, fault.draw)
    assert process is not None, f"no {fault.kind.role} among {before}"
    num_causes = len(service.first_causes())
    num_back = service.server.log.count(f"{process.title} is back")
    dealt = Dealt(fault.kind, process.title, time.monotonic())
    logger.info("%s: %s pid=%d", fault.kind, process.title, process.pid)
    strike(process, fault.kind.action)
    if fault.kind.action == "pause":
        time.sleep(PAUSE_S)
        dealt.back_at = service.wait_whole(titles, BACK_S)
        expected = 0
    elif mode == "exit":
        code = service.server.wait(noticed_s)
        expected = 1
        if code != 1:
            dealt.complaints.append(f"{fault.kind}: the server ended with {code}, not 1")
    else:
        wait_for(lambda: is_gone(process.pid), f"{process.title} is gone", noticed_s)
        if fault.kind.role == "api-server":  # whose process is there long before it serves
            back = f"{process.title} is back"
            wait_for(lambda: service.server.log.count(back) > num_back, back, BACK_S)
        dealt.back_at = service.wait_whole(titles, BACK_S)
        expected = 1
    causes = service.first_causes()[num_causes:]
    if len(causes) != expected:
        dealt.complaints.append(f"{fault.kind} {process.title}: first causes {causes}")
    if not dealt.back_at:
        service.start_again()
        dealt.back_at = service.wait_whole(titles, BACK_S)
    logger.info("%s: as before after %.1f s", fault.kind, dealt.back_after_s)
    return dealt


def is_gone(pid: int) -> bool:
    """Zombies are."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
