"""The command `raywire chaos`. Light, as `cluster/cli.py` is."""

import sys
from collections.abc import Sequence
from typing import Any

import click

from api.chaos import KINDS, Kind


class Kinds(click.ParamType[Sequence[Kind]]):
    """`kill-rank,pause-worker`."""

    name = "kinds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Sequence[Kind]:
        try:
            return [Kind.parse(word.strip()) for word in str(value).split(",")]
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Of the server.")
@click.option(
    "--admin-key",
    envvar="RAYWIRE_ADMIN_KEY",
    show_envvar=True,
    help="Of the server. In the environment nobody sees it in `ps`.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Decides kinds and times.")
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=1.0),
    default=600.0,
    show_default=True,
    help="Of the run, in seconds.",
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=1.0),
    default=60.0,
    show_default=True,
    help="Seconds from one fault to the next, about.",
)
@click.option(
    "--kinds",
    type=Kinds(),
    default=",".join(map(str, KINDS)),
    show_default=True,
    help="What may happen.",
)
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(min=1.0),
    default=120.0,
    show_default=True,
    help="Seconds after which a server that is not as before has not survived.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan, and deal no fault.")
def chaos(
    url: str,
    admin_key: str | None,
    seed: int,
    duration_s: float,
    interval_s: float,
    kinds: Sequence[Kind],
    patience_s: float,
    dry_run: bool,
) -> None:
    """Break a running server by a plan, and see that it recovers.

    Kills, hangs and pauses processes of a server that has an administrator's key. The plan comes
    from the seed alone and is shown first; the same seed is the same run again. A server that is
    started with --on-engine-death replace survives all of it; any other ends with each process that
    is killed or hangs, and whoever has started it must start it again within --patience.

    \b
    Examples:
      raywire chaos --dry-run --seed 7
      raywire chaos --seed 7 --kinds kill-rank,pause-worker --interval 30 --duration 300

    Exit codes: 0 as before after each fault, 1 not, 2 a mistake in the settings.
    """
    from cluster.chaos.plan import make_plan

    plan = make_plan(seed, duration_s, interval_s, kinds)
    for fault in plan:
        click.echo(fault)
    if dry_run:
        return
    # Only here: it brings HTTP along.
    from cluster.chaos.command import run_chaos

    sys.exit(0 if run_chaos(url, admin_key, plan, patience_s) else 1)
