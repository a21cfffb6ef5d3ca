"""Which data-parallel rank gets the next request. Pure: reports in, rank out; no clock, no socket.

Every rank has a price, in tokens of prefill: what a request waits for there, less what it need not
compute there. The lowest price wins.

    price =   REQUEST_TOKENS for each request in flight there
            + WAITING_TOKENS for each that waits there for its first step; up to four times as much
              the fuller the KV cache is, because then it waits until somebody has finished
            - tokens of the longest prefix of this prompt that the rank holds (`prefix_index`)
            - REQUEST_TOKENS for the rank that served this session last, or where it begins

So a prefix is worth a busier rank as long as it saves more work than stands before it, and a
session is worth one request: it breaks ties.

In flight is what this API server has there itself, which it knows exactly, and what the others
have, which a report says: its total less our share in that same report. However old a report is, it
neither hides nor doubles our own requests. What the others have sent since is not known. We assume
that each of them did as we did: several API servers that see the same report would otherwise all
run to the rank that was free in it.

Used by `engine_client`, and fed by it with what outputs and the coordinator say.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from api.prefix_index import Matches, PrefixIndex
from engine.codec import Array
from engine.errors import InvalidRequestError, UnavailableError
from engine.wire import EngineLoad, SchedulerStats

REQUEST_TOKENS = 128
"""What a request in flight costs the next one: about the tokens that it has yet to generate, each
of which takes a place in a step."""

WAITING_TOKENS = 512
"""And one that waits, beside that: its prompt goes first."""

HOME_TOKENS = 128
"""Prompts that begin alike for so long begin at one rank: shorter ones have little to gain."""

MAX_SESSIONS = 1 << 15
"""Sessions remembered. The least recently used go first."""

Rule = Literal["pinned", "prefix", "session", "load", "only"]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, and why."""

    rank: int
    matched_blocks: int
    """Full blocks of the prompt that the rank probably has in its prefix cache."""

    num_queued: int
    """Requests in flight there before this one, as far as was known."""

    rule: Rule
    """pinned: the request asked for the rank. only: no other rank is up. prefix: it holds more of
    the prompt than others, and none holds more. session: it is the session's rank. load: the
    least busy, all else being equal."""

    matched_tokens: int = 0
    claimed_at: int = 0
    """When the match was last claimed, for `LoadBalancer.correct`."""


ONLY_ROUTE = Route(0, 0, 0, "only")
"""For want of another."""


@dataclass(slots=True)
class RankLoad:
    """What is known of one rank's work."""

    is_up: bool = False
    num_own: int = 0
    """Requests of this API server in flight there, exactly."""

    num_others: int = 0
    """Those of the other API servers, when the rank reported last,"""

    num_own_reported: int = 0
    """and ours in that same report."""

    waiting_tokens: int = 0
    """What all that waits there costs."""

    servers: int = 0
    """API servers with requests in flight there, in that report: a bit mask."""

    def num_in_flight(self, num_other_servers: int) -> int:
        """An estimate: so many others have sent as much as we have since the report."""
        num_new = max(0, self.num_own - self.num_own_reported)
        return self.num_own + self.num_others + num_new * num_other_servers


class LoadBalancer:
    """Chooses ranks for the requests of one API server.

    Args:
        num_ranks: data-parallel size.
        client_index: which API server this is.
    """

    def __init__(self, num_ranks: int, client_index: int = 0) -> None:
        self.loads = [RankLoad() for _ in range(num_ranks)]
        self._client_index = client_index
        # Each API server begins with another rank, and with the next one every time: of equal ranks
        # none is asked by all.
        self._first = client_index % num_ranks
        self._num_other_servers = 0
        """With requests in flight anywhere, by the last reports."""
        self._prefixes: PrefixIndex | None = None
        self._sessions: OrderedDict[str, int] = OrderedDict()

    @property
    def num_tracked_prefixes(self) -> int:
        return 0 if self._prefixes is None else len(self._prefixes)

    # ---------------------------------------------------------------------------------- reports

    def mark_up(self, rank: int, block_size: int, cache_tokens: int) -> None:
        """A rank is ready, for the first time or again. Its prefix cache is empty.

        Args:
            rank: which.
            block_size: tokens of a block, the same on all ranks.
            cache_tokens: what its prefix cache holds; 0 without one.
        """
        if self._prefixes is None and cache_tokens and len(self.loads) > 1:
            self._prefixes = PrefixIndex(len(self.loads), block_size)
        if self._prefixes is not None:
            self._prefixes.restart(rank, cache_tokens)
        num_own = self.loads[rank].num_own  # those that fail with it are finished one by one
        self.loads[rank] = RankLoad(is_up=True, num_own=num_own)

    def mark_down(self, rank: int) -> None:
        """A rank is gone."""
        self.loads[rank].is_up = False

    def take_report(self, rank: int, report: SchedulerStats | EngineLoad) -> None:
        """What a rank has to do, as it said itself or as the coordinator passed it on.

        Of two reports the one that comes later counts, though the coordinator's may be a tenth of a
        second older: what follows from it holds for either.
        """
        load, counts, own = self.loads[rank], report.num_by_client, self._client_index
        load.num_own_reported = counts[own] if own < len(counts) else 0
        load.num_others = sum(counts) - load.num_own_reported
        load.waiting_tokens = report.num_waiting * _waiting_tokens(report.kv_cache_usage)
        load.servers = sum(1 << index for index, count in enumerate(counts) if count)
        servers = 0
        for each in self.loads:
            servers |= each.servers
        self._num_other_servers = (servers & ~(1 << own)).bit_count()

    def take_counters(self, rank: int, stats: SchedulerStats) -> None:
        """How much a rank has written into its cache: what it held before may be gone."""
        if self._prefixes is not None:
            num_computed = stats.prefix_cache_queries - stats.prefix_cache_hits
            self._prefixes.take_written(rank, num_computed + stats.num_generation_tokens)

    def forget_prefixes(self, rank: int) -> None:
        """The rank has reset its prefix cache."""
        if self._prefixes is not None:
            self._prefixes.forget(rank)

    # ----------------------------------------------------------------------------------- choice

    def choose(
        self,
        prompt_token_ids: Array | None,
        *,
        session: str | None = None,
        salt: Hashable = None,
        pinned_rank: int | None = None,
    ) -> Route:
        """Choose a rank and count a request as sent there. Call `finish` when it is over.

        Args:
            prompt_token_ids: `[num_tokens]` u32; None where no cached prefix can help.
            session: the client's name for requests that belong together.
            salt: what cached prefixes depend on beside their tokens.
            pinned_rank: the only rank that will do.

        Raises:
            InvalidRequestError: there is no such rank.
            UnavailableError: it is not up, or none is.
        """
        up = self._candidates(pinned_rank, self._begins_at(prompt_token_ids))
        keys, matches = self._match(prompt_token_ids, salt)
        served = None if session is None else self._rank_of_session(session)
        rank = up[0] if len(up) == 1 else self._cheapest(up, matches.num_tokens, served)
        if pinned_rank is not None:
            rule: Rule = "pinned"
        else:
            rule = _rule(rank, up, matches.num_tokens, served)
        route = self._route(rank, rule, matches, prompt_token_ids)
        self._note(rank, keys, session)
        return route

    def add(self, rank: int) -> None:
        """Count a request that follows another of the same prompt. Call `finish` likewise."""
        self.loads[rank].num_own += 1

    def finish(self, rank: int) -> None:
        """A request has ended, however it did."""
        self.loads[rank].num_own -= 1

    def correct(self, route: Route, num_cached_tokens: int) -> None:
        """Learn from the first output of a request what was really there."""
        # Half: of a prefix that is being evicted the end goes first.
        if self._prefixes is not None and 2 * num_cached_tokens < route.matched_tokens:
            self._prefixes.doubt(route.rank, route.claimed_at)

    def _begins_at(self, token_ids: Array | None) -> int:
        """The rank that a prompt is given to if all are equally busy and hold as much of it.

        A long one always begins with the same: so all API servers, which do not know each other's
        prompts, send those that begin alike to one rank as long as nothing speaks against it.
        """
        if token_ids is None or len(token_ids) < HOME_TOKENS:
            return self._first
        return crc32(token_ids[:HOME_TOKENS].tobytes()) % len(self.loads)

    def _candidates(self, pinned_rank: int | None, begins_at: int) -> list[int]:
        num_ranks = len(self.loads)
        if pinned_rank is None:
            # Of equals the first one is taken.
            order = (*range(begins_at, num_ranks), *range(begins_at))
            if up := [rank for rank in order if self.loads[rank].is_up]:
                return up
            raise UnavailableError("no engine core is ready")
        if not 0 <= pinned_rank < num_ranks:
            raise InvalidRequestError(
                f"data_parallel_rank must be from 0 to {num_ranks - 1}, not {pinned_rank}",
                "data_parallel_rank",
            )
        if not self.loads[pinned_rank].is_up:
            raise UnavailableError("the data-parallel rank that was asked for is not up")
        return [pinned_rank]

    def _rank_of_session(self, session: str) -> int:
        """Where it was served last. A new one begins where all API servers let it begin: the next
        of its requests may come to another."""
        begins_at = crc32(session.encode()) % len(self.loads)
        return self._sessions.get(session, begins_at)

    def _match(self, token_ids: Array | None, salt: Hashable) -> tuple[list[int], Matches]:
        if self._prefixes is None or token_ids is None:
            return [], Matches.nothing(len(self.loads))
        keys = self._prefixes.keys(token_ids, salt)
        return keys, self._prefixes.find(keys)

    def _cheapest(self, up: Sequence[int], num_tokens: Sequence[int], served: int | None) -> int:
        loads, num_others = self.loads, self._num_other_servers
        best, lowest, most = -1, 0, 0
        for rank in up:
            load, held = loads[rank], num_tokens[rank]
            num_requests = load.num_in_flight(num_others) - (rank == served)
            price = REQUEST_TOKENS * num_requests + load.waiting_tokens - held
            if best < 0 or price < lowest or (price == lowest and held > most):
                best, lowest, most = rank, price, held
        return best

    def _route(self, rank: int, rule: Rule, matches: Matches, token_ids: Array | None) -> Route:
        num_queued = self.loads[rank].num_in_flight(0)
        if self._prefixes is None or token_ids is None or not matches.num_tokens[rank]:
            return Route(rank, 0, num_queued, rule)
        # The last token is always computed: what follows it comes from there.
        block_size = self._prefixes.block_size
        num_blocks = min(matches.num_tokens[rank], len(token_ids) - 1) // block_size
        matched_tokens = num_blocks * block_size
        return Route(rank, num_blocks, num_queued, rule, matched_tokens, matches.claimed_at[rank])

    def _note(self, rank: int, keys: Sequence[int], session: str | None) -> None:
        self.loads[rank].num_own += 1
        self._first = (rank + 1) % len(self.loads)
        if self._prefixes is not None and keys:
            self._prefixes.claim(rank, keys)
        if session is not None:
            self._sessions[session] = rank
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)


def _rule(rank: int, up: Sequence[int], num_tokens: Sequence[int], served: int | None) -> Rule:
    """What made the difference."""
    if len(up) == 1:
        return "only"
    held = [num_tokens[each] for each in up]
    if num_tokens[rank] == max(held) > min(held):
        return "prefix"
    return "session" if rank == served else "load"


def _waiting_tokens(kv_cache_usage: float) -> int:
    """What one waiting request costs: the more, the less room there is for it."""
    percent_over_half = max(0, int(100 * kv_cache_usage) - 50)
    return WAITING_TOKENS + WAITING_TOKENS * 6 * percent_over_half // 100
