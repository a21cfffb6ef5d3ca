"""What a soak run has found: as JSON, and as a table for docs/reliability.md."""

import datetime
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tests.soak.faults import Dealt
from tests.soak.run import Outcome

BEGIN = "<!-- soak: written by `make soak` -->"
END = "<!-- end of soak -->"


def as_json(outcomes: Sequence[Outcome], seed: int, minutes: float) -> dict[str, Any]:
    """All that is worth keeping."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": seed,
        "minutes": minutes,
        "parts": [_part(outcome) for outcome in outcomes],
    }


def _part(outcome: Outcome) -> dict[str, Any]:
    ends: defaultdict[str, int] = defaultdict(int)
    for exchange in outcome.exchanges:
        ends[exchange.end] += 1
    return {
        "name": outcome.part.name,
        "wall_s": round(outcome.wall_s, 1),
        "requests": sum(each.end != "down" for each in outcome.exchanges),
        "ends": dict(ends),
        "compared": outcome.num_compared,
        "tokens": outcome.num_tokens,
        "failed": ends["error"] + ends["broken"],
        "starts": outcome.num_starts,
        "slowest_probe_s": round(outcome.slowest_probe_s, 3),
        "calm_gap_s": round(outcome.calm_gap_s(), 2),
        "kinds": {kind: _kind(outcome, faults) for kind, faults in by_kind(outcome.faults)},
        "complaints": outcome.complaints,
    }


def by_kind(faults: Iterable[Dealt]) -> list[tuple[str, list[Dealt]]]:
    found: defaultdict[str, list[Dealt]] = defaultdict(list)
    for fault in faults:
        found[str(fault.kind)].append(fault)
    return sorted(found.items())


def _kind(outcome: Outcome, faults: Sequence[Dealt]) -> dict[str, Any]:
    concerned = [
        each for each in outcome.exchanges if any(fault.concerns(each) for fault in faults)
    ]
    gaps = [gap for fault in faults for each in concerned for gap in fault.gaps(each)]
    return {
        "faults": len(faults),
        "requests": sum(each.end != "down" for each in concerned),
        "failed": sum(each.end in ("error", "broken") for each in concerned),
        "longest_gap_s": round(max(gaps, default=0.0), 2),
        "back_after_s": round(max(fault.back_after_s for fault in faults), 1),
    }


def markdown(report: dict[str, Any]) -> str:
    """The section, from its first to its last line."""
    parts = report["parts"]
    num_faults = sum(kind["faults"] for part in parts for kind in part["kinds"].values())
    complaints = sum(len(part["complaints"]) for part in parts)
    lines = [
        BEGIN,
        "",
        f"Of {report['date']}: {report['minutes']:g} minutes with seed {report['seed']},"
        f" {num_faults} faults survived,",
        f"{sum(part['requests'] for part in parts):,} requests checked, of which"
        f" {sum(part['compared'] for part in parts):,} were compared with undisturbed answers, and",
        f"{complaints or 'nothing'} to complain of.",
        "",
    ]
    for part in parts:
        lines += [
            f"**{part['name']}**: {part['requests']:,} requests, {part['tokens']:,} tokens,"
            f" {part['compared']:,} answers equal to their twins,",
            f"{part['failed']} failed because their server or API server was killed; slowest"
            f" probe {part['slowest_probe_s']:g} s, longest gap without a fault"
            f" {part['calm_gap_s']:g} s.",
            "",
            "| fault | times | requests meanwhile | of them failed | longest gap of a stream | as"
            " before after |",
            "|---|---|---|---|---|---|",
        ]
        for kind, row in part["kinds"].items():
            lines.append(
                f"| {kind} | {row['faults']} | {row['requests']} | {row['failed']}"
                f" | {row['longest_gap_s']:.2f} s | {row['back_after_s']:.1f} s |"
            )
        lines.append("")
    return "\n".join([*lines, END, ""])
