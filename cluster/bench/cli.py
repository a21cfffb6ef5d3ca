"""`raywire bench`: the commands and their flags, named as in `vllm bench …` where that has them.

Light, as `cluster/cli.py` is: each command imports what it measures with when it is called.
"""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cluster.option_groups import GroupedCommand, in_group

if TYPE_CHECKING:
    from cluster.bench.results import Output

F = TypeVar("F", bound=Callable[..., Any])


class Percentiles(click.ParamType[Sequence[float]]):
    """`50,90,99`."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Sequence[float]:
        try:
            numbers = [float(word) for word in str(value).split(",")]
        except ValueError:
            numbers = []
        if not numbers or not all(0 <= number <= 100 for number in numbers):
            self.fail(f"{value!r} are no percentiles (50,90,99)", param, ctx)
        return numbers


class Numbers(click.ParamType[Sequence[int]]):
    """`1,8,32`."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Sequence[int]:
        words = str(value).split(",")
        if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            self.fail(f"{value!r} are no positive numbers (1,8,32)", param, ctx)
        return [int(word) for word in words]


_COUNT = click.IntRange(min=1)
_count = in_group("Work")
_result = in_group("Results")

_RESULT_OPTIONS = [
    _result("--json", "--output-json", "json_file", metavar="FILE", help="JSON too; - shows that."),
    _result("--save-result", "is_saved", is_flag=True, help="JSON in a file named by the time."),
    _result(
        "--metric-percentiles",
        "percentiles",
        type=Percentiles(),
        default="50,90,99",
        show_default=True,
        help="Percentiles in the table.",
    ),
]


def _with_results(command: F) -> F:
    """The flags for results, after all others."""
    for option in reversed(_RESULT_OPTIONS):
        command = option(command)
    return command


def _length(name: str, default: int, help: str) -> Callable[[F], F]:
    return _count(name, type=_COUNT, default=default, show_default=True, help=help)


def _repeats(default: int) -> Callable[[F], F]:
    return _length("--repeats", default, "Measure so often, and show how far that spreads.")


def _warmups(name: str, default: int, help: str) -> Callable[[F], F]:
    return _count(name, type=click.IntRange(0), default=default, show_default=True, help=help)


def _output(flags: dict[str, Any]) -> "Output":
    """Takes the flags for results out of all flags."""
    from cluster.bench.results import Output

    file = flags.pop("json_file")
    if file is not None and not Path(file).parent.is_dir():  # before anything is measured
        raise click.BadParameter(f"there is no folder {Path(file).parent}", param_hint="--json")
    return Output(file, flags.pop("is_saved"), flags.pop("percentiles"))


@click.group()
def bench() -> None:
    """Measure the speed of a server, of the LLM class, of the parts.

    \b
    raywire bench serve --port 8000 --max-concurrency 8    a running server, ours or another
    raywire bench latency --model demo --batch-size 1      one batch at a time, without HTTP
    raywire bench schedule                                 a scheduler's own time, no model

    Every command shows percentiles, the spread over repeats and what others had of the machine:
    quote ratios that were taken in one sitting, and nothing that is marked with *.
    """


@bench.command(cls=GroupedCommand)
@in_group("Model")("--model", default="demo", show_default=True, help="As `raywire serve` has it.")
@_length("--input-len", 32, "Tokens of each prompt, random and all different.")
@_length("--output-len", 128, "Tokens that are generated for each.")
@_length("--batch-size", 8, "Prompts at once.")
@_warmups("--num-iters-warmup", 2, "Batches before those that count.")
@_length("--num-iters", 4, "Batches in a repeat.")
@_repeats(3)
@_with_results
def latency(**flags: Any) -> None:
    """Time batches through the LLM class.

    One after the other, without HTTP: prefill, decode step, the whole batch.
    """
    output = _output(flags)
    from cluster.bench.latency import LatencySettings, measure_latency
    from cluster.bench.results import emit

    emit(measure_latency(LatencySettings(**_split_engine(LatencySettings, flags))), output)


@bench.command(cls=GroupedCommand)
@in_group("Model")("--model", default="demo", show_default=True, help="As `raywire serve` has it.")
@_length("--num-prompts", 64, "Prompts of a repeat, all handed over at once.")
@_length("--input-len", 128, "Tokens of each prompt, random and all different.")
@_length("--output-len", 128, "Tokens that are generated for each.")
@_count(
    "--dataset",
    "--dataset-path",
    "dataset",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON lines, {"prompt": …, "output_tokens": …}, instead of random prompts.',
)
@_warmups("--num-warmups", 4, "Prompts before those that count.")
@_repeats(3)
@_with_results
def throughput(**flags: Any) -> None:
    """Fill the LLM class with prompts.

    All at once, without HTTP: requests and tokens a second.
    """
    output = _output(flags)
    from cluster.bench.results import emit
    from cluster.bench.throughput import ThroughputSettings, measure_throughput

    emit(measure_throughput(ThroughputSettings(**_split_engine(ThroughputSettings, flags))), output)


def _split_engine(settings: type, flags: dict[str, Any]) -> dict[str, Any]:
    """What is no field of the settings is an argument of LLM."""
    ours = {name: flags[name] for name in flags if name in settings.__annotations__}
    return {**ours, "engine": {name: flags[name] for name in flags if name not in ours}}


@bench.command(cls=GroupedCommand)
@in_group("Server")("--base-url", help="Such as https://host/prefix, instead of host and port.")
@in_group("Server")("--host", default="127.0.0.1", show_default=True, help="Of the server.")
@in_group("Server")("--port", type=int, default=8000, show_default=True, help="Of the server.")
@in_group("Server")(
    "--endpoint",
    type=click.Choice(["/v1/completions", "/v1/chat/completions"]),
    default="/v1/completions",
    show_default=True,
    help="A chat needs a dataset: it has texts.",
)
@in_group("Server")("--model", help="Name in the API; unless given, the first of /v1/models.")
@in_group("Server")(
    "--header", multiple=True, metavar="KEY=VALUE", help="For every request; may be repeated."
)
@in_group("Server")(
    "--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Where one is asked."
)
@_length("--num-prompts", 100, "Requests of a repeat.")
@_count(
    "--request-rate",
    type=float,
    default=float("inf"),
    show_default=True,
    help="Requests a second, as a Poisson process; inf: all at once.",
)
@_count("--max-concurrency", type=_COUNT, help="Requests in flight at most.")
@_length("--input-len", 128, "Tokens of each prompt, random and all different.")
@_length("--output-len", 64, "Tokens that each answer has.")
@_count(
    "--dataset",
    "--dataset-path",
    "dataset",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON lines, {"prompt": …, "output_tokens": …}, instead of random prompts.',
)
@_count("--token-ids", default="32-127", show_default=True, help="Of random prompts: from-below.")
@_count("--temperature", type=float, default=0.0, show_default=True, help="Of all requests.")
@_count("--top-p", type=float, help="Of all requests.")
@_count(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Always --output-len tokens; a field that not every server knows.",
)
@_warmups("--num-warmups", 4, "Requests before those that count.")
@_repeats(1)
@_count(
    "--seed",
    type=int,
    help="Of prompts and arrivals. Unless given, another one each time: prompts that a server has"
    " seen are in its prefix cache.",
)
@_with_results
def serve(**flags: Any) -> None:
    """Load a running server, ours or another.

    It speaks OpenAI's API and streams: time to the first token, between tokens, to the last; tokens
    a second; errors.

    \b
    Examples:
      raywire bench serve --port 8000 --max-concurrency 8 --repeats 3
      raywire bench serve --base-url http://10.0.0.5:8000 --request-rate 4 --dataset prompts.jsonl
    """
    output = _output(flags)
    from cluster.bench.results import emit
    from cluster.bench.serve import ServeSettings, measure_serve

    if flags["seed"] is None:
        flags["seed"] = secrets.randbits(31)
    emit(measure_serve(ServeSettings(**flags)), output)


@bench.command(cls=GroupedCommand)
@click.argument("model", default="demo")
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
@_warmups("--num-warmups", 1, "Starts before those that count: the first may build kernels.")
@_repeats(3)
@_with_results
def startup(**flags: Any) -> None:
    """Start and stop `raywire serve`.

    Time to ready, to the first token, and to the end; memory; load while idle.

    \b
    Flags of `raywire serve` follow after two dashes:
      raywire bench startup demo --repeats 5 -- --max-model-len 1024
    """
    output = _output(flags)
    from cluster.bench.results import emit
    from cluster.bench.startup import measure_startup

    emit(measure_startup(**flags), output)


@bench.command(cls=GroupedCommand)
@_length("--rounds", 1000, "Messages of each kind in a repeat.")
@_length("--prompt-tokens", 128, "Of a request; 256 make a message of 1 KiB.")
@_repeats(3)
@_with_results
def wire(rounds: int, prompt_tokens: int, repeats: int, **flags: Any) -> None:
    """Time API server to engine core and back.

    Over ipc, TCP and encrypted TCP, one message at a time; and the codec by itself.
    """
    output = _output(flags)
    from cluster.bench.results import emit
    from cluster.bench.wire import measure_wire

    emit(measure_wire(rounds, repeats, prompt_tokens), output)


@bench.command(cls=GroupedCommand)
@_count("--readers", type=Numbers(), default="1,2", show_default=True, help="Workers on the ring.")
@_length("--rounds", 1000, "Round trips of each size in a repeat; fewer of large ones.")
@_repeats(3)
@_with_results
def ring(readers: Sequence[int], rounds: int, repeats: int, **flags: Any) -> None:
    """Time engine core to workers and back.

    Through shared memory, bare and with the executor around it; and the load of parked readers.
    """
    output = _output(flags)
    from cluster.bench.results import emit
    from cluster.bench.ring import measure_ring

    emit(measure_ring(readers, rounds, repeats), output)


@bench.command(cls=GroupedCommand)
@_count("--running", type=Numbers(), default="1,32,256", show_default=True, help="Requests.")
@_length("--rounds", 200, "Steps in a repeat.")
@_repeats(3)
@_with_results
def schedule(running: Sequence[int], rounds: int, repeats: int, **flags: Any) -> None:
    """Time an engine core's own part of a step.

    Schedule, update, encode; admission of fresh requests; block hashes. No model, no sockets.
    """
    output = _output(flags)
    from cluster.bench.results import emit
    from cluster.bench.schedule import measure_schedule

    emit(measure_schedule(running, rounds, repeats), output)
