"""Results as Markdown: ours, the peer's, and the ratio of the two."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.bench.machine import Load
from cluster.bench.results import number
from tests.bench.server_run import ServerResult

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"

OFFLINE_METRICS = {
    "decode_step_ms": ("decode step, ms", False),
    "prefill_tokens_per_s": ("prefill, tokens/s", True),
    "output_tokens_per_s": ("output, tokens/s", True),
}
"""Field of `offline_run`'s rows to label, and whether more is better."""

STREAM_METRICS = {
    "output_tokens_per_s": ("output, tokens/s", True),
    "first_token_ms": ("first token, ms (median)", False),
    "between_tokens_ms": ("between tokens, ms (median)", False),
    "between_tokens_p99_ms": ("between tokens, ms (99%)", False),
}
"""Field of `Streams` to label, and whether more is better."""


@dataclass(slots=True)
class EngineResult:
    """All measurements of one engine."""

    name: str
    version: str
    offline: list[dict[str, float]] = field(default_factory=list)
    """Rows of `offline_run`."""
    server: ServerResult | None = None
    loads: dict[str, Load] = field(default_factory=dict)
    """By measurement: what the machine did meanwhile."""


@dataclass(frozen=True, slots=True)
class Report:
    command: str
    date: str
    machine: str
    model: str
    prompt_tokens: int
    output_tokens: int
    engines: list[EngineResult]
    """Ours first, then the peer if there is one."""

    def markdown(self) -> str:
        names = " and ".join(f"{engine.name} {engine.version}" for engine in self.engines)
        head = [
            f"Measured on {self.date} by `{self.command}`",
            f"on {self.machine}.",
            f"{names}; model `{self.model}`, {self.prompt_tokens} prompt and"
            f" {self.output_tokens} output tokens a request, greedy, prefix caching off.",
        ]
        if len(self.engines) > 1:
            head.append("A ratio is ours to theirs, in bold where ours is the better one.")
        return "\n".join(
            [BEGIN, *head, "", *self._offline(), *self._server(), *self._loads(), END, ""]
        )

    def _offline(self) -> Iterator[str]:
        yield from self._table("`LLM` class", self._offline_metrics())

    def _offline_metrics(self) -> Iterator["_Metric"]:
        for key, (label, more_is_better) in OFFLINE_METRICS.items():
            for i, row in enumerate(self.engines[0].offline):
                values = [engine.offline[i][key] for engine in self.engines]
                yield _Metric(f"{label}, batch {row['batch']:.0f}", values, more_is_better)

    def _server(self) -> Iterator[str]:
        yield from self._table("Server", self._server_metrics())
        for engine in self.engines:
            if engine.server is not None:
                parts = sorted(engine.server.memory, key=lambda part: -part.pss_mib)
                shares = ", ".join(f"{part.title} {part.pss_mib:.0f}" for part in parts)
                yield f"Memory of {engine.name} by process, MiB: {shares}."
                yield ""

    def _server_metrics(self) -> Iterator["_Metric"]:
        servers = [engine.server for engine in self.engines if engine.server is not None]
        if not servers:
            return

        def metric(label: str, of: Callable[[ServerResult], float], more: bool) -> _Metric:
            return _Metric(label, [of(server) for server in servers], more)

        yield metric("start to /health, s", lambda s: s.ready_s, False)
        yield metric("memory (PSS), MiB", lambda s: sum(p.pss_mib for p in s.memory), False)
        yield metric("idle, cores", lambda s: s.idle_cores, False)
        yield metric("SIGTERM to end, s", lambda s: s.stop_s, False)
        for key, (label, more) in STREAM_METRICS.items():
            for i, streams in enumerate(servers[0].streams):
                yield _Metric(
                    f"{label}, {streams.concurrency} stream{'s' * (streams.concurrency > 1)}",
                    [getattr(server.streams[i], key) for server in servers],
                    more,
                )

    def _table(self, title: str, metrics: Iterable["_Metric"]) -> Iterator[str]:
        rows = [metric.cells() for metric in metrics]
        if not rows:
            return
        columns = [title, *(engine.name for engine in self.engines), "ratio"][: len(rows[0])]
        yield from table(columns, rows)

    def _loads(self) -> Iterator[str]:
        yield (
            "What else the machine did (share of all cores, ours / others): "
            + "; ".join(
                f"{engine.name} {what} {load.ours:.0%} / {load.others:.0%}"
                for engine in self.engines
                for what, load in engine.loads.items()
            )
            + "."
        )


@dataclass(frozen=True, slots=True)
class _Metric:
    label: str
    values: list[float]
    """Ours, then the peer's."""
    more_is_better: bool

    def cells(self) -> list[str]:
        cells = [self.label, *(number(value) for value in self.values)]
        if len(self.values) == 2:
            cells.append(self._ratio())
        return cells

    def _ratio(self) -> str:
        ours, theirs = self.values
        if theirs <= 0:
            return ""
        ratio = ours / theirs
        is_better = ratio > 1 if self.more_is_better else ratio < 1
        return f"**{ratio:.2f}**" if is_better else f"{ratio:.2f}"


def write_into(file: Path, markdown: str) -> None:
    """Replace the figures in a document by newer ones; what is written around them stays. They are
    those between the same first and last line as in `markdown`."""
    text = file.read_text(encoding="utf-8")
    first, *_, last = markdown.splitlines()
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last + "\n")
    if not begin or not end:
        raise ValueError(f"{file} has no lines {first} and {last}")
    file.write_text(before + markdown + after, encoding="utf-8")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, and an empty one: labels on the left, numbers to the right of them."""
    for cells in (columns, ["---", *["---:"] * (len(columns) - 1)], *rows):
        yield f"| {' | '.join(cells)} |"
    yield ""
