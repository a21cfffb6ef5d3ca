"""What `scale` has measured, as Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.bench.percentile import percentile
from cluster.bench.results import number
from cluster.bench.wire import PROMPT_TOKENS, Trips
from tests.bench.bench_route import NUM_RANKS, NUM_TRACKED
from tests.bench.data_parallel import ROLES, ScaleResult
from tests.bench.ray_start import RayStart
from tests.bench.summary import table

BEGIN, END = "<!-- bench dp: begin -->", "<!-- bench dp: end -->"


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Milliseconds of each request, by way: `first_token` says which."""

    core: list[float]
    llm: list[float]
    http: list[float]


@dataclass(frozen=True, slots=True)
class RouteCost:
    """Microseconds of one choice."""

    prompt_tokens: int
    new_us: float
    known_us: float


@dataclass(frozen=True, slots=True)
class ScaleFigures:
    scale: list[ScaleResult]
    """The first is what the others are compared with."""
    first_tokens: FirstTokens
    trips: list[Trips]
    """The first is ipc."""
    routes: list[RouteCost]
    ray: RayStart | None


@dataclass(frozen=True, slots=True)
class ScaleReport:
    command: str
    date: str
    machine: str
    version: str
    step_s: float
    figures: ScaleFigures

    def markdown(self) -> str:
        shape = self.figures.scale[0].shape
        head = [
            f"Measured on {self.date} by `{self.command}`",
            f"on {self.machine}.",
            f"raywire {self.version}; the scripted model, which computes nothing, at"
            f" {self.step_s * 1e3:.0f} ms a step; {shape.streams_per_rank} streams for each rank,"
            f" {shape.window_s:.0f} s.",
        ]
        parts = [self._scale(), self._cpu(), self._start(), self._first_tokens(), self._trips()]
        tables = (line for part in (*parts, self._routes()) for line in part)
        return "\n".join([BEGIN, *head, "", *tables, END, ""])

    def _scale(self) -> Iterator[str]:
        one = self.figures.scale[0]
        per_rank = one.load.tokens_per_s / one.shape.ranks
        columns = ["ranks", "API servers", "tokens/s", "efficiency", "streams per rank"]
        columns += ["cores used", "waited for a core", "others"]
        yield from table(
            columns,
            [
                [
                    str(each.shape.ranks),
                    str(each.shape.api_servers),
                    number(each.load.tokens_per_s),
                    f"**{each.load.tokens_per_s / per_rank / each.shape.ranks:.2f}**",
                    _span(list(each.load.streams_by_rank.values())),
                    f"{each.cores_used:.2f}",
                    f"{each.wait_share:.0%}",
                    f"{each.others_share:.0%}",
                ]
                for each in self.figures.scale
            ],
        )
        yield (
            "Efficiency is tokens/s over so many times those of the first row. *Cores used* are"
            " those of all our processes, the client's too. *Waited for a core*: the share of the"
            " time that an engine core or its worker was ready to run, and the cores were taken."
            " *Others*: what other processes had of all cores."
        )
        yield ""

    def _cpu(self) -> Iterator[str]:
        roles = [role for role in ROLES if any(role in each.cpu_s for each in self.figures.scale)]
        yield from table(
            ["CPU s per 1,000 tokens: ranks", "API servers", *roles, "all"],
            [
                [
                    str(each.shape.ranks),
                    str(each.shape.api_servers),
                    *(f"{each.cpu_s_per_1000_tokens(role):.3f}" for role in roles),
                    f"{sum(map(each.cpu_s_per_1000_tokens, roles)):.3f}",
                ]
                for each in self.figures.scale
            ],
        )

    def _start(self) -> Iterator[str]:
        rows = [
            [f"-dp {each.shape.ranks}", f"{each.ready_s:.1f}", f"`{each.waterfall}`"]
            for each in self.figures.scale
            if each.shape.api_servers == each.shape.ranks  # as it is without more flags
        ]
        ray = self.figures.ray
        if ray is not None:
            job = f"-dp {ray.num_ranks}, a job on a Ray cluster that took {ray.ray_s:.1f} s itself"
            rows.append([job, f"{ray.ready_s:.1f}", f"`{ray.waterfall}`"])
        yield from table(["start to /ready", "s", "the server's log"], rows)

    def _first_tokens(self) -> Iterator[str]:
        times = self.figures.first_tokens
        ways = {
            "`EngineCore`, called by hand": times.core,
            "`LLM` class": times.llm,
            "HTTP, streamed": times.http,
        }
        rows = [
            [name, *(number(percentile(each, p)) for p in (50, 95))] for name, each in ways.items()
        ]
        added = [percentile(times.http, p) - percentile(times.llm, p) for p in (50, 95)]
        rows.append(["**HTTP adds to `LLM`**", *(f"**{value:.2f}**" for value in added)])
        yield from table(["first token, ms, one request at a time", "50%", "95%"], rows)

    def _trips(self) -> Iterator[str]:
        ipc = self.figures.trips[0]
        cells = [
            [
                trips.wire,
                *(
                    number(percentile(each, p))
                    for each in (trips.calls, trips.requests)
                    for p in (50, 99)
                ),
                f"{percentile(trips.requests, 50) / percentile(ipc.requests, 50):.2f}",
            ]
            for trips in self.figures.trips
        ]
        columns = ["wire 1, there and back, µs", "call 50%", "99%"]
        columns += [f"{PROMPT_TOKENS} tokens to first output 50%", "99%", "ratio"]
        yield from table(columns, cells)

    def _routes(self) -> Iterator[str]:
        yield from table(
            [
                f"choice of a rank, µs: {NUM_RANKS} ranks, {NUM_TRACKED:,} prefixes",
                "new prompt",
                "known",
            ],
            [
                [f"{each.prompt_tokens:,} tokens", number(each.new_us), number(each.known_us)]
                for each in self.figures.routes
            ],
        )


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
