"""`make demo-cluster`: a Ray cluster on this machine, a server on it as a job, a streamed answer.

    python -m cluster.demo_cluster [--port 8000]

As `make demo`, it leaves everything running and says how to stop it. What a real cluster has beside
this are nodes: the job is submitted in the same way, and the log tells the same story.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from cluster.demo import PROMPT, check_port, curl_line, exit_on_sigterm, stream, wait_ready
from cluster.demo_keeper import JOB, NUM_RANKS

_OF_RAYS_COMMAND = re.compile(r"[\d-]{10} [\d:,]{12}\s+[A-Z]+ \w+\.py:\d+ -- |\s*$")
"""What `ray job submit` says itself, between the lines of the job."""


@click.command(help=__doc__)
@click.option("--port", default=8000, show_default=True)
@click.option("--model", default="demo", show_default=True)
@click.option(
    "--log", "log_path", default="raywire-demo-cluster.log", type=click.Path(path_type=Path)
)
def main(port: int, model: str, log_path: Path) -> None:
    check_port(port, target="demo-cluster")
    exit_on_sigterm()
    # Short: Ray puts sockets below it, and their paths must stay under 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rw-"))
    click.echo(f"a Ray cluster on this machine, and on it, as a job with {NUM_RANKS} ranks,")
    click.echo(f"  python -m cluster serve {model} -dp {NUM_RANKS}")
    click.echo(f"its log is in {log_path}")
    keeper = _start_keeper(folder, model, port, log_path)
    try:
        wait_ready(keeper, port, log_path, lambda line: _OF_RAYS_COMMAND.match(line) is None)
        click.secho(f"\n{PROMPT}", bold=True, nl=False)
        for text in stream(model, port):
            click.echo(text, nl=False)
    except BaseException:
        click.echo("stopping Ray and what runs on it", err=True)
        keeper.terminate()
        keeper.wait()
        raise
    click.echo(_farewell(model, port, keeper.pid, folder))


def _start_keeper(folder: Path, model: str, port: int, log_path: Path) -> "subprocess.Popen[bytes]":
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cluster.demo_keeper", str(folder), model, str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it outlives this terminal's Ctrl-C
        )


def _farewell(model: str, port: int, pid: int, folder: Path) -> str:
    settings = (folder / "env").read_text()
    dashboard = re.search(r"RAY_API_SERVER_ADDRESS='(.*)'", settings)
    assert dashboard is not None, "the keeper writes it first"
    return f"""

The cluster keeps running, with the server as its job `{JOB}`. Talk to it:

{curl_line(model, port)}

Look at it:

  . {folder}/env         # in a shell of its own: where the cluster is, and the token
  ray job logs -f {JOB}
  ray status
  echo $RAY_AUTH_TOKEN           # the dashboard asks for it: {dashboard[1]}

See its processes:   ps -eo pid,args | grep -E '[R]AYWIRE::|[r]ay::'
Stop it:             kill {pid}"""


if __name__ == "__main__":
    main()
