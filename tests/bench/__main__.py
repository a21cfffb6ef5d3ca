"""`make bench`: raywire on this machine and, where it is installed, vLLM's CPU build, in turns.

    python -m tests.bench                              only us
    python -m tests.bench --only model,server          some sections of it
    python -m tests.bench --vllm-python VENV/bin/python [--vllm-env KEY=VALUE …]
    python -m tests.bench --write docs/performance.md --write README.md

Both engines are kept up and measured in turns (A B A B) on the same weights and the same requests,
so that whatever else happens on the machine happens to both. A ratio is the median over the turns,
with the least and the most of them. Quote ratios; absolute figures are this machine's, and those
that were taken while others had more than 5% of it are marked.

Sections, in this order:

    model    decode steps and prefills through the `LLM` class
    float32  the same beside the peer in float32
    int8     our int8 weights against our bf16, and their perplexity
    server   a real model's server: start, streams, memory, idle load, end
    tiny     a tiny model's server: start, memory, requests and tokens a second
    parts    ring, codec, scheduler, block hashes, the engine's own step
    curves   what things cost as work grows; only us
    dp       several ranks behind one endpoint, and the wires; only us

What is measured is kept beside the document, in performance.json, so that a section can be measured
again by itself; --write puts all of it into the document.
"""

import datetime
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click

from cluster import environment
from cluster.bench import machine
from cluster.model_source import resolve
from tests.bench.curve_report import curves
from tests.bench.curves_section import CurveSettings, measure_curves
from tests.bench.document import write_into
from tests.bench.engines import Engine, engines, shown_command
from tests.bench.figures import Axis, Figure, Run, Store, read_store, write_store
from tests.bench.int8_section import measure_int8
from tests.bench.model_section import ModelSettings, measure_float32, measure_model
from tests.bench.parts_section import PartSettings, measure_parts
from tests.bench.scale import STEP_S, ScaleSettings, measure_all
from tests.bench.scale_report import ScaleReport
from tests.bench.server_section import ServerSettings, measure_server, measure_tiny
from tests.bench.summary import short, summary
from tests.bench.tiny_llama import tiny_llama

SECTIONS = ("model", "float32", "int8", "server", "tiny", "parts", "curves", "dp")


class Sections(click.ParamType[Sequence[str]]):
    """`model,server`."""

    name = "sections"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Sequence[str]:
        words = str(value).split(",")
        if unknown := set(words) - set(SECTIONS):
            self.fail(f"no section {min(unknown)}; there are {', '.join(SECTIONS)}", param, ctx)
        return words


@dataclass(frozen=True, slots=True)
class Options:
    """The flags that sections share."""

    model: str
    prompt_tokens: int
    output_tokens: int
    repeats: int
    max_ranks: int
    ranks: Sequence[int]
    streams_per_rank: int
    window_s: float
    rounds: int
    with_ray: bool
    logs: Path


@click.command(help=__doc__)
@click.option("--model", default="demo", show_default=True)
@click.option("--prompt-tokens", default=128, show_default=True, help="Of a request over HTTP.")
@click.option("--output-tokens", default=32, show_default=True, help="Of a request over HTTP.")
@click.option("--repeats", default=3, show_default=True, help="Turns of each side.")
@click.option(
    "--only", type=Sections(), default=",".join(SECTIONS), show_default=True, help="Sections."
)
@click.option("--max-ranks", default=64, show_default=True, help="Of curves: ranks as processes.")
@click.option("--ranks", default="1,2,4,8", show_default=True, help="Of dp: data-parallel sizes.")
@click.option("--streams-per-rank", default=8, show_default=True, help="Of dp's load.")
@click.option("--window", default=6.0, show_default=True, help="Seconds of dp's load.")
@click.option("--rounds", default=1000, show_default=True, help="Of dp's single requests.")
@click.option("--ray", "with_ray", is_flag=True, help="In dp: start a server on Ray, too.")
@click.option("--vllm-python", type=click.Path(exists=True), help="Python with vLLM's CPU build.")
@click.option("--vllm-env", multiple=True, metavar="KEY=VALUE", help="For vLLM; may be repeated.")
@click.option("--vllm-dtype", default="auto", show_default=True, help="Of vLLM's weights.")
@click.option("--logs", type=click.Path(path_type=Path), help="Folder for logs and raw figures.")
@click.option(
    "--write",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Document to update; may be repeated. The figures are kept beside the first.",
)
def main(
    only: Sequence[str],
    ranks: str,
    window: float,
    vllm_python: str | None,
    vllm_env: Sequence[str],
    vllm_dtype: str,
    logs: Path | None,
    write: Sequence[Path],
    **flags: object,
) -> None:
    logs = (logs or Path(tempfile.mkdtemp(prefix="raywire-bench-"))).absolute()
    logs.mkdir(exist_ok=True)
    click.echo(f"logs are in {logs}", err=True)
    ranks_of_dp = [int(number) for number in ranks.split(",")]
    options = Options(ranks=ranks_of_dp, window_s=window, logs=logs, **flags)  # type: ignore[arg-type]
    measured = engines(vllm_python, vllm_env, vllm_dtype)
    run = _run(measured)
    file = write[0].with_suffix(".json") if write else logs / "performance.json"
    failed = []
    for section in only:
        click.echo(f"section {section}", err=True)
        try:
            for part in _parts(section, options, measured, run, file):
                _show(part, write)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            click.echo(f"section {section} failed: {error}", err=True)
            failed.append(section)  # others may still be measured
    if failed:
        raise click.ClickException(f"not measured: {', '.join(failed)}; logs are in {logs}")


def _parts(
    section: str, options: Options, measured: Sequence[Engine], run: Run, file: Path
) -> list[str]:
    """Measure a section, keep its figures, and return the parts of the documents."""
    if section == "dp":
        return [_scale(options, measured[0], run)]
    store = _measured(section, options, measured, run, read_store(file))
    write_store(file, store)
    return [short(store.figures), summary(store.figures), curves(store.axes)]


def _show(part: str, write: Sequence[Path]) -> None:
    click.echo(part)
    for file in write:
        write_into(file, part)


def _measured(
    section: str, options: Options, measured: Sequence[Engine], run: Run, store: Store
) -> Store:
    """What is known, with the figures of one section measured anew."""
    say = partial(click.echo, err=True)
    if section == "curves":
        settings = CurveSettings(_folder(options), options.logs, options.max_ranks)
        axes = measure_curves(measured[0], settings, say)
        return store.updated({}, {key: _axis_of(axis, run) for key, axis in axes.items()})
    figures = _figures(section, options, measured, say)
    alone = section == "int8" or len(measured) == 1
    of_run = replace(run, vllm="") if alone else run
    return store.updated({key: replace(figure, run=of_run) for key, figure in figures.items()}, {})


def _axis_of(axis: Axis, run: Run) -> Axis:
    return replace(axis, run=replace(run, vllm=""))


def _figures(
    section: str, options: Options, measured: Sequence[Engine], say: Callable[[str], None]
) -> Mapping[str, Figure]:
    match section:
        case "model":
            return measure_model(measured, _model_settings(options), say)
        case "float32":
            return measure_float32(measured, _model_settings(options), say)
        case "int8":
            return measure_int8(measured[0], _model_settings(options), say)
        case "server":
            return measure_server(measured, _server_settings(options, _folder(options)), say)
        case "tiny":
            settings = _server_settings(options, _tiny())
            settings = replace(settings, prompt_tokens=16, output_tokens=64)
            return measure_tiny(measured, settings, say)
        case "parts":
            return measure_parts(
                measured, PartSettings(_tiny(), options.repeats, options.logs), say
            )
        case _:
            raise AssertionError(section)


def _model_settings(options: Options) -> ModelSettings:
    return ModelSettings(_folder(options), options.repeats, options.logs)


def _server_settings(options: Options, folder: Path) -> ServerSettings:
    return ServerSettings(
        folder, options.prompt_tokens, options.output_tokens, options.repeats, options.logs
    )


def _folder(options: Options) -> Path:
    return resolve(options.model, cache_dir=environment.read(os.environ).cache_dir)


def _tiny() -> Path:
    return tiny_llama(environment.read(os.environ).cache_dir)


def _run(measured: Sequence[Engine]) -> Run:
    ours, *peers = measured
    return Run(
        date=datetime.date.today().isoformat(),
        command=shown_command(sys.argv[1:]),
        machine=machine.describe(),
        raywire=ours.version(),
        vllm=peers[0].version() if peers else "",
    )


def _scale(options: Options, ours: Engine, run: Run) -> str:
    """Several ranks, and what lies between them and the client."""
    settings = ScaleSettings(
        ranks=options.ranks,
        streams_per_rank=options.streams_per_rank,
        window_s=options.window_s,
        rounds=options.rounds,
        with_ray=options.with_ray,
        environ=ours.environ,
        logs=options.logs,
    )
    return ScaleReport(
        command=run.command,
        date=run.date,
        machine=run.machine,
        version=run.raywire,
        step_s=STEP_S,
        figures=measure_all(settings, partial(click.echo, err=True)),
    ).markdown()


if __name__ == "__main__":
    main()
