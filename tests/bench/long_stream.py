"""One long answer, streamed over HTTP from a scripted model, and the time that each token took."""

from pathlib import Path

from cluster.bench import server_process
from cluster.bench.http_load import Endpoint, run_load
from cluster.bench.serve import completion_body
from cluster.bench.workload import Item
from tests.bench.engines import Engine

_NAME = "bench"


def gaps_us(ours: Engine, model: Path, num_tokens: int, logs: Path) -> list[float]:
    """Microseconds between one token and the next, of an answer of so many. Where an event brings
    several, which happens when the client is slower, its time is shared out evenly.

    Args:
        ours: whose server is started.
        model: folder of a scripted model that speaks for ever.
    """
    port = server_process.free_port()
    command = server_process.raywire_command(str(model), port, ["--served-model-name", _NAME])
    log = logs / "long-stream.log"
    with server_process.started(command, ours.environ, port, log, "/ready"):
        body = completion_body(_NAME, Item([65, 66, 67], num_tokens + 1))
        (answer,) = run_load(Endpoint("127.0.0.1", port, "/v1/completions"), [body]).answers
    if answer.error is not None or answer.num_tokens != num_tokens + 1:
        raise RuntimeError(f"{answer.num_tokens} tokens, {answer.error}; see {log}")
    gaps = answer.between_events_s
    share = len(gaps) / num_tokens
    return [gaps[int(token * share)] * share * 1e6 for token in range(num_tokens)]
