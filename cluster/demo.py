"""`make demo`: start `raywire serve demo` in the background, show a streamed answer, and leave.

    python -m cluster.demo [--port 8000]

A user's first minute, so every way it can fail ends in one line that says what to do.
`demo_cluster` does the same on a Ray cluster, with the functions here.
"""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from cluster.http_socket import listen
from engine.errors import ConfigError

HOST = "127.0.0.1"
PROMPT = "Once upon a time, there was a"
SAMPLING = {"max_tokens": 60, "temperature": 0.7, "top_p": 0.9}
"""A base model of this size drifts off when its unlikely tokens are allowed."""
START_TIMEOUT_S = 600.0


@click.command(help=__doc__)
@click.option("--port", default=8000, show_default=True)
@click.option("--model", default="demo", show_default=True)
@click.option("--log", "log_path", default="raywire-demo.log", type=click.Path(path_type=Path))
def main(port: int, model: str, log_path: Path) -> None:
    check_port(port)
    exit_on_sigterm()
    click.echo(f"starting `raywire serve {model}`; its log is in {log_path}")
    server = _start(model, port, log_path)
    try:
        wait_ready(server, port, log_path)
        click.secho(f"\n{PROMPT}", bold=True, nl=False)
        for text in stream(model, port):
            click.echo(text, nl=False)
    except BaseException:
        server.terminate()  # without it a failed demo would leave a server that nobody knows of
        raise
    click.echo(_farewell(model, port, server.pid))


def exit_on_sigterm() -> None:
    """As Ctrl-C does, end with what has been started; `timeout make demo` sends this."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def check_port(port: int, target: str = "demo") -> None:
    """Before anything is started, and before a log is overwritten: the demo before may still run,
    and its server's answer is not this one's."""
    try:
        listen(HOST, port).close()
    except ConfigError as error:
        raise click.ClickException(f"{error} (`make {target} PORT={port + 1}`)") from error


def _start(model: str, port: int, log_path: Path) -> "subprocess.Popen[bytes]":
    # INFO, whatever the environment says: the start is shown, and `wait_ready` reads it.
    flags = ["--host", HOST, "--port", str(port), "--log-level", "INFO"]
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cluster", "serve", model, *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it outlives this terminal's Ctrl-C
        )


def wait_ready(
    server: "subprocess.Popen[bytes]",
    port: int,
    log_path: Path,
    is_shown: Callable[[str], bool] = lambda line: True,
) -> None:
    """Show what the server says of its start, until it is ready.

    Whatever answers on the port is this server only once this server's own log says that it
    listens.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    is_listening = False
    with log_path.open(encoding="utf-8", errors="replace") as log:
        while time.monotonic() < deadline:
            has_ended = server.poll() is not None
            for line in log.readlines():
                if is_shown(line):
                    click.secho(f"  {line.rstrip().rpartition('] ')[2]}", dim=True)
                is_listening = is_listening or "] listening on " in line
            if has_ended:
                raise click.ClickException(f"the server has ended; see {log_path}")
            if is_listening and _is_ready(port):
                return
            time.sleep(0.2)
    raise click.ClickException(f"not ready within {START_TIMEOUT_S:.0f} s; see {log_path}")


def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    return False


def stream(model: str, port: int) -> Iterator[str]:
    """The text of one completion, as it comes."""
    body = {"model": model, "prompt": PROMPT, "seed": 7, "stream": True, **SAMPLING}
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise click.ClickException(response.read().decode(errors="replace"))
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise click.ClickException(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["text"]


def curl_line(model: str, port: int) -> str:
    """How to ask the server something, word for word."""
    body = json.dumps({"model": model, "prompt": "The sea is", "stream": True, **SAMPLING})
    return f"""\
  curl -N http://{HOST}:{port}/v1/completions \\
    -H 'Content-Type: application/json' -d '{body}'"""


def _farewell(model: str, port: int, pid: int) -> str:
    return f"""

The server keeps running. Talk to it:

{curl_line(model, port)}

See its processes:   ps -eo pid,args | grep '[R]AYWIRE::'
Stop it:             kill {pid}"""


if __name__ == "__main__":
    main()
