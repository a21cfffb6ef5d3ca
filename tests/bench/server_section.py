"""`--only server` and `--only tiny`: servers as users start them, side by side and loaded in turns.

The peer's server starts first, which takes it more than a minute, and stays up idle; then ours
starts as often as asked, and stays up too. A turn is one wave of requests to one of them, while the
other sleeps: that it does is checked first, and what it takes all the same counts as others.
"""

import math
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bench import server_process
from cluster.bench.http_load import Endpoint, LoadResult, run_load
from cluster.bench.machine import ProcessMemory, Tree, watch
from cluster.bench.offline_run import token_range
from cluster.bench.percentile import percentile
from cluster.bench.serve import completion_body
from cluster.bench.workload import Item, TokenRange, random_items
from tests.bench import limits
from tests.bench.engines import Engine, wait_at_rest
from tests.bench.figures import Figure, Recorder, turns
from tests.bench.limits import Limit

NAME = "bench"
STREAMS = (1, 8, 32)
FRONT_END_STREAMS = 64
_NUM_ONE_TOKEN = 1024
_WARM_UP = (16, 4)
"""Prompt and output tokens of the requests that warm up."""
_IDLE_S = 5.0
_STOP_TIMEOUT_S = 60.0
_GIB = 1024.0
"""MiB of it."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    folder: Path
    prompt_tokens: int
    output_tokens: int
    repeats: int
    logs: Path


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs."""

    engine: Engine
    process: "subprocess.Popen[bytes]"
    tree: Tree
    port: int
    first_token_s: float
    """From the command to its first token."""


def measure_server(
    engines: Sequence[Engine], settings: ServerSettings, say: Callable[[str], None]
) -> dict[str, Figure]:
    """Start, memory, idle load, streams and end of a real model's server."""
    machine, work = limits.measure(engines[0].environ), limits.model_work(settings.folder)
    recorder = Recorder()
    flags = ("--max-num-seqs", str(max(STREAMS)), "--no-enable-prefix-caching")
    with _all_up(engines, settings, flags, recorder, "demo", say) as servers:
        _measure_idle(servers, recorder)
        for count in STREAMS:
            _measure_streams(servers, settings, count, recorder, say)
        _measure_waiting(servers, settings, recorder)
        _measure_memory(servers, recorder, "memory-demo", say)
        weights = 2 * (work.layer_params + work.head_params)
        recorder.limit("memory-demo", Limit(weights / 2**30, "weights"))
        for server in servers:
            with recorder.turn(server.engine.side) as found:
                found["stop"] = _stop(server)
    if work.layer_params:
        lengths = settings.prompt_tokens, settings.output_tokens
        for count in STREAMS:
            recorder.limit(f"http-{count}", work.tokens_per_s(machine, count, *lengths))
    return recorder.figures()


def measure_tiny(
    engines: Sequence[Engine], settings: ServerSettings, say: Callable[[str], None]
) -> dict[str, Figure]:
    """Start, memory and front end of a server whose model costs next to nothing."""
    recorder = Recorder()
    flags = ("--max-num-seqs", "256", "--no-enable-prefix-caching")
    with _all_up(engines, settings, flags, recorder, "tiny", say) as servers:
        _measure_front_end(servers, settings, recorder, say)
        _measure_memory(servers, recorder, "memory-tiny", say)
    return recorder.figures()


# ----------------------------------------------------------------------------------- up and down


@contextmanager
def _all_up(
    engines: Sequence[Engine],
    settings: ServerSettings,
    flags: Sequence[str],
    recorder: Recorder,
    model: str,
    say: Callable[[str], None],
) -> Iterator[list[Served]]:
    """All servers, ours first. Ours is started so often, the peer once."""
    ours, *peers = engines
    with ExitStack() as stack:
        servers: list[Served] = []
        for engine in (*peers, *[ours] * settings.repeats):
            if engine is ours and servers and servers[-1].engine is ours:
                _stop(servers.pop())
            others = [each.tree for each in servers]
            wait_at_rest(*others)
            say(f"{engine.name} starts")
            with recorder.turn(engine.side, *others) as found:
                server = stack.enter_context(_up(engine, settings, flags))
                found[f"start-{model}"] = server.first_token_s
            say(f"{engine.name}: first token after {server.first_token_s:.1f} s")
            servers.append(server)
        yield servers[::-1]


@contextmanager
def _up(engine: Engine, settings: ServerSettings, flags: Sequence[str]) -> Iterator[Served]:
    port = server_process.free_port()
    flags = [
        *("--max-model-len", str(settings.prompt_tokens + settings.output_tokens)),
        *("--max-num-batched-tokens", "2048", "--served-model-name", NAME, *flags),
    ]
    folder, log = str(settings.folder), settings.logs / f"{engine.name}-server.log"
    if engine.side == "ours":
        command, probe = server_process.raywire_command(folder, port, flags), "/ready"
    else:
        flags += ["--dtype", engine.dtype]
        command, probe = _vllm_command(engine.python, folder, port, flags), "/health"
    began = time.monotonic()
    with server_process.started(command, engine.environ, port, log, probe) as (process, _):
        _ask(port, [completion_body(NAME, Item([65, 66, 67], 1))], 1)
        first_token_s = time.monotonic() - began
        yield Served(engine, process, Tree(process.pid), port, first_token_s)


def _vllm_command(python: str, folder: str, port: int, flags: Sequence[str]) -> list[str]:
    """Without its access log, which costs it more than ours costs us."""
    words = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    return [*words, "--port", str(port), "--disable-uvicorn-access-log", *flags]


def _stop(server: Served) -> float:
    """Seconds from SIGTERM to the end of the command."""
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(_STOP_TIMEOUT_S)
    return time.monotonic() - began


# ------------------------------------------------------------------------------------- in turns


def _measure_idle(servers: Sequence[Served], recorder: Recorder) -> None:
    wait_at_rest(*(server.tree for server in servers))
    before_s = [server.tree.cpu_s() for server in servers]
    with watch() as load:
        time.sleep(_IDLE_S)
    for server, cpu_s in zip(servers, before_s, strict=True):
        cores = (server.tree.cpu_s() - cpu_s) / _IDLE_S
        recorder.add(server.engine.side, {"idle": cores}, load)


def _measure_streams(
    servers: Sequence[Served],
    settings: ServerSettings,
    count: int,
    recorder: Recorder,
    say: Callable[[str], None],
) -> None:
    """One wave after the other: as many requests as streams, three where it is one."""
    ids = TokenRange(*token_range(str(settings.folder)))
    noise = random.Random(count)

    def wave(server: Served, found: dict[str, float], is_warm_up: bool) -> None:
        num_requests = 3 if count == 1 else count
        lengths = _WARM_UP if is_warm_up else (settings.prompt_tokens, settings.output_tokens)
        items = random_items(num_requests, *lengths, ids, noise)
        load = _ask(server.port, [completion_body(NAME, item) for item in items], count)
        found[f"http-{count}"] = load.output_tokens_per_s
        gaps_s = load.between_tokens_s or [0.0]  # where one event brought all
        found[f"between-{count}"] = percentile(gaps_s, 99) * 1e3
        found[f"first-{count}"] = statistics.median(load.first_token_s) * 1e3
        say(f"{count} streams, {server.engine.name}: {load.output_tokens_per_s:.1f} tokens/s")

    _take_turns(servers, settings, wave, recorder)


def _measure_waiting(
    servers: Sequence[Served], settings: ServerSettings, recorder: Recorder
) -> None:
    """What an engine core takes while its workers compute: prompts, as many tokens as steps hold,
    so that there is hardly anything but waiting."""
    ids = TokenRange(*token_range(str(settings.folder)))
    noise = random.Random(0)

    def wave(server: Served, found: dict[str, float], is_warm_up: bool) -> None:
        num_requests = 1 if is_warm_up else max(STREAMS)
        items = random_items(num_requests, settings.prompt_tokens, 1, ids, noise)
        core_s = _core_cpu_s(server.tree)
        load = _ask(server.port, [completion_body(NAME, item) for item in items], num_requests)
        found["waiting"] = (_core_cpu_s(server.tree) - core_s) / load.wall_s

    _take_turns(servers, settings, wave, recorder)


def _measure_front_end(
    servers: Sequence[Served],
    settings: ServerSettings,
    recorder: Recorder,
    say: Callable[[str], None],
) -> None:
    ids = TokenRange(*token_range(str(settings.folder)))
    noise = random.Random(0)

    def bodies(count: int, length: int, **fields: Any) -> list[dict[str, Any]]:
        items = random_items(count, settings.prompt_tokens, length, ids, noise)
        return [{**completion_body(NAME, item), **fields} for item in items]

    def wave(server: Served, found: dict[str, float], is_warm_up: bool) -> None:
        plain = bodies(_NUM_ONE_TOKEN, 1, stream=False)
        for body in plain:
            del body["stream_options"]
        load = _ask(server.port, plain, FRONT_END_STREAMS)
        found["requests-64"] = len(plain) / load.wall_s
        output = _WARM_UP[1] if is_warm_up else settings.output_tokens
        streamed = bodies(2 * FRONT_END_STREAMS, output)
        load = _ask(server.port, streamed, FRONT_END_STREAMS)
        found["streamed-64"] = load.output_tokens_per_s
        say(
            f"{server.engine.name}: {found['requests-64']:.0f} requests/s,"
            f" {found['streamed-64']:.0f} tokens/s"
        )

    _take_turns(servers, settings, wave, recorder)


def _take_turns(
    servers: Sequence[Served],
    settings: ServerSettings,
    wave: Callable[[Served, dict[str, float], bool], None],
    recorder: Recorder,
) -> None:
    """A short wave for each comes first, to warm up."""
    for server in servers:
        wave(server, {}, True)
    for _ in turns(settings.repeats):
        for server in servers:
            others = [other.tree for other in servers if other is not server]
            wait_at_rest(*others)
            with recorder.turn(server.engine.side, *others) as found:
                wave(server, found, False)


def _measure_memory(
    servers: Sequence[Served], recorder: Recorder, key: str, say: Callable[[str], None]
) -> None:
    """After the load: what was needed has been touched by then."""
    for server in servers:
        memory = server.tree.memory()
        with recorder.turn(server.engine.side) as found:
            found[key] = sum(part.pss_mib for part in memory) / _GIB
        say(f"{server.engine.name}, MiB: {_shares(memory)}")


def _shares(memory: Sequence[ProcessMemory]) -> str:
    parts = sorted(memory, key=lambda part: -part.pss_mib)
    return ", ".join(f"{part.title} {part.pss_mib:.0f}" for part in parts)


def _core_cpu_s(tree: Tree) -> float:
    """Of the engine core, which both engines title so."""
    return math.fsum(usage.cpu_s for usage in tree.usages().values() if "EngineCore" in usage.title)


def _ask(port: int, bodies: Sequence[dict[str, Any]], concurrency: int) -> LoadResult:
    """All must give all their tokens."""
    endpoint = Endpoint("127.0.0.1", port, "/v1/completions")
    load = run_load(endpoint, bodies, max_concurrency=concurrency)
    wanted = sum(int(body["max_tokens"]) for body in bodies)
    if load.num_tokens != wanted:
        raise RuntimeError(f"{load.num_tokens} of {wanted} tokens: {load.errors[:1]}")
    return load
