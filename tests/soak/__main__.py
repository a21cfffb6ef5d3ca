"""`make soak`: half an hour of mixed load with a fault a minute, all oracles checked.

    python -m tests.soak --minutes 30 --seed 7 --write
    python -m tests.soak --minutes 3 --interval 20 --only "scripted, exit"

The same seed asks the same and deals the same faults at the same times. `--write` puts the result
into docs/reliability.md; report.json and the logs of all servers are in the folder that is named at
the end. Exit code 1 if there is anything to complain of.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from api.chaos import Kind
from cluster.chaos.cli import Kinds
from cluster.chaos.plan import make_plan
from tests.bench.document import write_into
from tests.soak.parts import PARTS
from tests.soak.report import as_json, markdown
from tests.soak.run import run_part

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"


@click.command(help=__doc__)
@click.option("--minutes", type=click.FloatRange(min=0.5), default=30.0, show_default=True)
@click.option("--interval", default=60.0, show_default=True, help="Seconds from fault to fault.")
@click.option("--seed", default=1, show_default=True)
@click.option("--only", multiple=True, type=click.Choice([part.name for part in PARTS]))
@click.option("--kinds", type=Kinds(), help="Faults, as `raywire chaos` has them.")
@click.option("--write", is_flag=True, help="Into docs/reliability.md.")
def main(
    minutes: float,
    interval: float,
    seed: int,
    only: tuple[str, ...],
    kinds: Sequence[Kind] | None,
    write: bool,
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parts = [part for part in PARTS if not only or part.name in only]
    whole = sum(part.share for part in parts)
    folder = Path(tempfile.mkdtemp(prefix="soak-logs-"))
    outcomes = []
    for number, part in enumerate(parts):
        duration_s = minutes * 60 * part.share / whole
        logging.info("%s: %.0f s; logs in %s", part.name, duration_s, folder)
        plan = make_plan(seed + number, duration_s, interval, kinds or part.kinds)
        outcome = run_part(part, seed + number, plan, duration_s, folder / str(number))
        for complaint in outcome.complaints:
            logging.error("%s", complaint)
        outcomes.append(outcome)
    report = as_json(outcomes, seed, minutes)
    text = markdown(report)
    click.echo(text)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    logging.info("logs and report.json in %s", folder)
    if write:
        write_into(DOCUMENT, text)
    sys.exit(1 if any(outcome.complaints for outcome in outcomes) else 0)


if __name__ == "__main__":
    main()
