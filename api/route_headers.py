"""The headers that concern the choice of a rank: what a client asks for, and what it is told.

    X-data-parallel-rank: 1       this rank and no other
    X-Session-ID: chat-42         requests of one session share a rank where that costs nothing
    X-Raywire-Route: rank=1; matched=3; queue=2; rule=prefix

The last one is in the response where there are several ranks: which one, how many blocks of the
prompt it probably had, how many requests were in flight there, and why it was chosen
(`load_balancer.Route`). A request with several prompts has one entry for each, separated by commas.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from api.ids import is_safe
from api.load_balancer import Route
from engine.errors import InvalidRequestError

PINNED_RANK = "X-data-parallel-rank"
SESSION = "X-Session-ID"
ROUTE = "X-Raywire-Route"

MAX_ENTRIES = 16
"""Of one response: proxies refuse long headers. `omitted=N` stands for the others."""

_RAW_PINNED_RANK, _RAW_SESSION = PINNED_RANK.lower().encode(), SESSION.lower().encode()
_RANK = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class RouteWish:
    """What a request says about its rank."""

    pinned_rank: int | None = None
    session: str | None = None

    def with_session(self, name: str) -> "RouteWish":
        """The same for another session, if that is a name."""
        return RouteWish(self.pinned_rank, name) if is_safe(name) else self


def read(headers: Sequence[tuple[bytes, bytes]], ranks: range) -> RouteWish:
    """What the client asks for. A session name that is long or strange is no session.

    Args:
        headers: of the request, with names in lower case.
        ranks: of this server. Clients count those of all servers, a RouteWish only these.

    Raises:
        InvalidRequestError: there is no such rank.
    """
    session: str | None = None
    wishes: list[str] = []
    for name, value in headers:
        if name == _RAW_SESSION and is_safe(named := value.decode("latin-1")):
            session = named
        elif name == _RAW_PINNED_RANK:
            wishes.append(value.decode("latin-1"))
    if not wishes:
        return RouteWish(None, session)
    given = ", ".join(wishes)  # of two, none is more meant than the other
    if not _RANK.fullmatch(given) or int(given) not in ranks:
        is_one = len(ranks) == 1
        there_is = f"{ranks[0]}, the only one" if is_one else f"from {ranks[0]} to {ranks[-1]}"
        raise InvalidRequestError(
            f"the header {PINNED_RANK} must be a rank, {there_is}, not {given[:40]!r}", PINNED_RANK
        )
    return RouteWish(ranks.index(int(given)), session)


def write(routes: Sequence[Route], ranks: range) -> dict[str, str]:
    """The response's header; none where there was no choice."""
    if len(ranks) == 1:
        return {}
    entries = [
        f"rank={ranks[route.rank]}; matched={route.matched_blocks}; queue={route.num_queued};"
        f" rule={route.rule}"
        for route in routes[:MAX_ENTRIES]
    ]
    if len(routes) > MAX_ENTRIES:
        entries.append(f"omitted={len(routes) - MAX_ENTRIES}")
    return {ROUTE: ", ".join(entries)}
