"""All figures as one table, and in words where the peer wins and which bars are missed."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import ascii_lowercase

from cluster.bench.results import number
from tests.bench.figures import Figure, Run
from tests.bench.rows import ROWS, Row

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
SHORT_BEGIN, SHORT_END = "<!-- bench short: begin -->", "<!-- bench short: end -->"

SHORT_ROWS = {
    "http-8": "8 streams over HTTP",
    "start-demo": "from the command to the first token",
    "memory-demo": "memory of all processes",
}
"""The three that matter most: row to what the README calls it."""


def summary(figures: Mapping[str, Figure]) -> str:
    """The part of the document between BEGIN and END."""
    shown = [(row, figures[row.key]) for row in ROWS if row.key in figures]
    letters = _letters(figure.run for _, figure in shown)
    lines = [*_verdicts(shown), *_table(shown, letters), *_runs(shown, letters)]
    return "\n".join([BEGIN, *lines, END, ""])


def short(figures: Mapping[str, Figure]) -> str:
    """What a reader of the README should know, between SHORT_BEGIN and SHORT_END."""
    rows = {row.key: row for row in ROWS}
    lines: list[str] = []
    for key, text in SHORT_ROWS.items():
        figure = figures.get(key)
        if figure is not None and (ratios := figure.ratios(rows[key].is_rate)):
            if not lines and figure.run is not None:
                lines += [f"{figure.run.date}, {figure.run.machine}:", ""]
            ours, theirs = (_value(side, rows[key]) for side in (figure.ours, figure.theirs))
            mark = ", under load" if figure.is_spoiled else ""
            lines.append(
                f"- {text}: {ours} against {theirs}, **{statistics.median(ratios):.1f} times as"
                f" good**{mark}"
            )
    return "\n".join([SHORT_BEGIN, *lines, SHORT_END, ""])


def _letters(runs: Iterable[Run | None]) -> dict[Run, str]:
    """A letter for each run."""
    distinct = dict.fromkeys(run for run in runs if run is not None)
    return dict(zip(distinct, ascii_lowercase, strict=False))


def _table(shown: Sequence[tuple[Row, Figure]], letters: Mapping[Run, str]) -> Iterator[str]:
    columns = ["what", "vLLM", "raywire", "times as good", "bar", "limit here", "run"]
    yield from table(
        columns,
        [
            [
                row.label,
                _value(figure.theirs, row) + ("" if row.is_beside_vllm else f" ({row.peer})"),
                _value(figure.ours, row) + ("" if figure.theirs else _mark(figure)),
                ratio(figure, row),
                _bar(figure, row),
                _limit(figure, row),
                letters.get(figure.run, "") if figure.run is not None else "",
            ]
            for row, figure in shown
        ],
    )


def _value(samples: Sequence[float], row: Row) -> str:
    if not samples:
        return "–"
    middle = statistics.median(samples)
    # Of idle processes, hundredths of a core would all be the same.
    shown = f"{middle:.3f}" if row.unit == "cores" else number(middle)
    return f"{shown} {row.unit}".rstrip()


def _mark(figure: Figure) -> str:
    return "\\*" if figure.is_spoiled else ""


def ratio(figure: Figure, row: Row) -> str:
    """The median over the turns, in bold where ours is better, and least and most of them; a star
    where others had the machine."""
    ratios = figure.ratios(row.is_rate)
    if not ratios:
        return ""
    middle = statistics.median(ratios)
    text = f"**{_times(middle)}**" if middle > 1 else _times(middle)
    if len(ratios) > 1:
        text += f" ({_times(min(ratios))}–{_times(max(ratios))})"
    return text + _mark(figure)


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 10 else number(value)


def _bar(figure: Figure, row: Row) -> str:
    if row.bar is None:
        return ""
    shown = row.bar.shown(row.unit)
    match row.bar.is_met(figure, row.is_rate):
        case True:
            return f"{shown}: met"
        case False:
            return f"{shown}: **missed**"
        case None:
            return shown


def _limit(figure: Figure, row: Row) -> str:
    """The limit, what it is bound by, and which share of it we reach."""
    if figure.limit is None or not figure.limit.value:
        return ""
    middle = statistics.median(figure.ours)
    limit = figure.limit
    share = middle / limit.value if row.is_rate else limit.value / middle
    return f"{number(limit.value)} {row.unit}, {limit.by}: {share:.0%}"


def _verdicts(shown: Sequence[tuple[Row, Figure]]) -> Iterator[str]:
    compared = [
        (row, statistics.median(ratios))
        for row, figure in shown
        if row.is_beside_vllm and (ratios := figure.ratios(row.is_rate))
    ]
    if compared:
        lost = [f"{row.label} ({middle:.2f})" for row, middle in compared if middle < 1]
        num_won = len(compared) - len(lost)
        yield f"- Of {len(compared)} rows beside vLLM, raywire is ahead in {num_won}."
        yield f"- **vLLM wins**: {'; '.join(lost)}." if lost else "- vLLM wins none of them."
    missed = [
        row.label
        for row, figure in shown
        if row.bar is not None and row.bar.is_met(figure, row.is_rate) is False
    ]
    yield f"- **Bars missed**: {'; '.join(missed)}." if missed else "- No bar is missed."
    if any(figure.is_spoiled for _, figure in shown):
        yield "- A \\* marks what was taken while others had over 5% of the cores: measure again."
    yield ""


def _runs(shown: Sequence[tuple[Row, Figure]], letters: Mapping[Run, str]) -> Iterator[str]:
    for run, letter in letters.items():
        others = max(figure.others for _, figure in shown if figure.run == run)
        versions = f"raywire {run.raywire}" + (f", vLLM {run.vllm}" if run.vllm else "")
        yield (
            f"- {letter}: {run.date}, `{run.command}`; {run.machine}; {versions}; others had at"
            f" most {others:.0%} of the cores"
        )
    if letters:
        yield ""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, and an empty one: labels on the left, numbers to the right of them."""
    for cells in (columns, ["---", *["---:"] * (len(columns) - 1)], *rows):
        yield f"| {' | '.join(cells)} |"
    yield ""
