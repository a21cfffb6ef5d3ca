"""Keys are nowhere but where they are compared: not in arguments, environments, logs, metrics,
answers or files."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import environment
from cluster.access import secrets_for_nodes
from cluster.actors import variables_for_nodes
from cluster.cli import _arguments_on_nodes, serve
from cluster.config import EngineOptions, ServeConfig
from cluster.environment import Environment
from cluster.secret_arguments import redacted
from tests.helpers.server import ROOT, Server, running_server

ON_LINE, IN_FILE, IN_VARIABLE = "sk-line-5d0c", "sk-file-5d0c", "sk-variable-5d0c"
ADMIN = "sk-admin-5d0c"
SECRETS = (ON_LINE, IN_FILE, IN_VARIABLE, ADMIN)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two ranks and two API servers, with a key from everywhere."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{IN_FILE}\n")
    keys.chmod(0o600)
    flags = ("-dp", "2", "--api-server-count", "2", "--prefix-cache-salt-per-key")
    given = ("--api-key", ON_LINE, "--api-key-file", str(keys), *flags)
    variables = {"RAYWIRE_API_KEY": IN_VARIABLE, "RAYWIRE_ADMIN_KEY": ADMIN, "VLLM_API_KEY": "x"}
    with running_server("scripted", *given, env=variables) as server:
        yield server


def post(server: Server, key: str, path: str = "/v1/completions", prompt: str = "x" * 64) -> object:
    with server.http() as http:
        answer = http.post(path, json={"prompt": prompt}, headers={"x-api-key": key})
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.row("S-08", "S-42")
def test_keys_show_nowhere(server: Server) -> None:
    """In no process of the server, while all of them let their owners in."""
    for key in (ON_LINE, IN_FILE, IN_VARIABLE):
        post(server, key)
    with server.http() as http:
        answers = [
            http.get("/metrics", headers={"x-api-key": ON_LINE}),
            http.get("/server_info?config_format=json", headers={"x-api-key": ON_LINE}),
            http.get("/openapi.json", headers={"x-api-key": ON_LINE}),
            http.get("/v1/models", headers={"x-api-key": ON_LINE + "x"}),
            http.post("/reset_prefix_cache", headers={"x-api-key": ADMIN}),
            http.get(f"/nope/{ON_LINE}"),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 401, 200, 401]
    shown = {f"answer {i}": answer.text for i, answer in enumerate(answers)}
    shown["log"] = server.log.replace(f"/nope/{ON_LINE}", "")
    processes = server.processes()
    assert len(processes) >= 8
    for process in processes:
        proc = Path(f"/proc/{process.pid}")
        for name in ("cmdline", "environ", "comm"):
            if process.pid == server.process.pid and name == "environ":
                continue  # what its starter gave it: of its own user, and of nobody else's
            shown[f"{process.title} {name}"] = (proc / name).read_bytes().decode(errors="replace")
    for file in server.folder.rglob("*"):
        if file.is_file():
            shown[str(file)] = file.read_bytes().decode(errors="replace")
    found = [where for where, text in shown.items() for key in SECRETS if key in text]
    assert found == []
    assert server.log.count("stays in the shell's history") == 1
    assert "VLLM_API_KEY is vLLM's and has no effect here; use RAYWIRE_API_KEY" in server.log


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.row("S-46")
def test_prefixes_are_shared_with_those_of_the_same_key_only(server: Server) -> None:
    """The same prompt under another key finds nothing cached; a client's own salt keeps prompts
    apart within a key."""

    def cached(key: str, **fields: str) -> int:
        body = {"prompt": "A prompt that several keys send, of a few blocks of tokens.", **fields}
        with server.http() as http:
            headers = {"x-api-key": key, "X-data-parallel-rank": "0"}  # each rank has its own cache
            answer = http.post("/v1/completions", json=body, headers=headers)
        usage = answer.json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(ON_LINE) == 0
    hit = cached(ON_LINE)
    assert hit > 0
    assert [cached(IN_FILE), cached(IN_FILE)] == [0, hit]
    assert [cached(ON_LINE, cache_salt="a"), cached(IN_FILE, cache_salt="a")] == [0, 0]
    assert [cached(ON_LINE, cache_salt="a"), cached(ON_LINE)] == [hit, hit]


@pytest.mark.row("S-08")
def test_a_command_line_is_shown_without_its_keys() -> None:
    """However they are written; nothing else is changed."""
    given = f"serve m --api-key {ON_LINE} --api-key={ON_LINE} --port 0 --api-key-file f"
    assert redacted(given.split()) == (
        ["serve", "m", "--api-key", "***", "--api-key=***", "--port", "0", "--api-key-file", "f"]
    )
    header = ["bench", "serve", "--header", "Authorization=Bearer k"]
    assert redacted(header) == ["bench", "serve", "--header", "***"]
    assert redacted(["serve", "m"]) == ["serve", "m"]


@pytest.mark.row("S-08")
def test_ray_names_a_job_without_its_keys() -> None:
    """Its dashboard shows the command line of the process that connects; by then it is hidden, and
    `ps` shows the same."""
    script = (
        "import sys; from cluster.secret_arguments import hide; hide(sys.argv[1:]);"
        "from ray._private.utils import get_entrypoint_name as name; print(name());"
        "print(open('/proc/self/cmdline').read())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script, "serve", "m", "--api-key", ON_LINE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert shown.count("raywire serve m --api-key ***") == 2
    assert ON_LINE not in shown


@pytest.mark.row("S-08")
def test_servers_of_other_nodes_get_keys_by_no_argument(tmp_path: Path) -> None:
    """With hybrid balancing: as variables of their process, which Ray's runtime environment and its
    dashboard know nothing of. Engine cores get none."""
    file = tmp_path / "keys"
    file.write_text(f"{IN_FILE}\n")
    arguments = ["m", "--api-key", ON_LINE, "--api-key-file", str(file), "-dp", "2"]
    flags = serve.make_context("serve", arguments).params
    model = flags.pop("model")
    variables = {"RAYWIRE_API_KEY": IN_VARIABLE, "RAYWIRE_LOG_LEVEL": "INFO"}
    config = ServeConfig(
        engine=EngineOptions(model="m"),
        environment=environment.read(variables),
        api_key=(ON_LINE,),
        api_key_file=file,
    )

    on_nodes = " ".join(_arguments_on_nodes(model, flags))
    assert "-size 2" in on_nodes
    assert not [key for key in SECRETS if key in on_nodes]
    assert secrets_for_nodes(config)["RAYWIRE_API_KEY"].split() == [ON_LINE, IN_VARIABLE, IN_FILE]
    assert variables_for_nodes(variables, is_ray_job=True) == {"RAYWIRE_LOG_LEVEL": "INFO"}
    shown = repr(config)
    assert not [key for key in SECRETS if key in shown]
    environment.take_secrets(variables)
    assert variables == {"RAYWIRE_LOG_LEVEL": "INFO"}
    assert environment.read({"RAYWIRE_API_KEY": " a  b\n"}) == Environment(
        api_keys=("a", "b"), cache_dir=environment.read({}).cache_dir
    )
