"""Everything a user can set. Adding to it is a decision: change this file on purpose."""

import re
from collections.abc import Iterator

import click

from cluster.cli import cli
from cluster.environment import VARIABLES
from tests.helpers.server import ROOT

_ACCESS = """
    --admin-key-file --api-key --api-key-file --metrics-key-file --no-open-metrics
    --no-prefix-cache-salt-per-key --open-metrics --prefix-cache-salt-per-key
    --ssl-ca-certs --ssl-cert-reqs --ssl-certfile --ssl-keyfile
"""
_OF_A_SERVER = f"""{_ACCESS}
    --allow-credentials --allowed-headers --allowed-methods --allowed-origins --api-server-count
    --async-scheduling --attention-backend --block-size --chat-template
    --data-parallel-backend --data-parallel-hybrid-lb --data-parallel-placement
    --data-parallel-rank --data-parallel-size --data-parallel-size-local
    --data-parallel-start-rank --device --disable-fastapi-docs --dtype --enable-auto-tool-choice
    --enable-chunked-prefill --enable-prefix-caching --enforce-eager --generation-config --host
    --kv-cache-memory-bytes
    --linear-backend --log-level --long-prefill-token-threshold --max-model-len
    --max-n --max-num-batched-tokens --max-num-queued-reqs --max-num-queued-tokens --max-num-seqs
    --max-stored-responses
    --no-allow-credentials --no-async-scheduling --no-data-parallel-hybrid-lb
    --no-disable-fastapi-docs --no-enable-auto-tool-choice
    --no-enable-chunked-prefill --no-enable-prefix-caching --no-enforce-eager
    --no-return-tokens-as-token-ids
    --no-trust-request-chat-template
    --num-gpu-blocks-override --on-engine-death --override-generation-config
    --pipeline-parallel-size --placement-timeout --port --quantization
    --ray-address --reasoning-parser --return-tokens-as-token-ids --root-path --scheduling-policy
    --seed --send-timeout --served-model-name --shutdown-timeout --startup-timeout
    --tensor-parallel-size
    --tool-call-parser --trust-request-chat-template --wire-port-range -dp -pp -tp
"""

_NOT_OF_A_BATCH = f"""{_ACCESS}
    --allow-credentials --allowed-headers --allowed-methods --allowed-origins
    --disable-fastapi-docs --no-allow-credentials --no-disable-fastapi-docs --root-path
    --data-parallel-hybrid-lb --data-parallel-rank --data-parallel-start-rank --host
    --max-num-queued-reqs --max-num-queued-tokens --max-stored-responses
    --no-data-parallel-hybrid-lb --port --send-timeout --shutdown-timeout
"""
_RESULTS = "--json --metric-percentiles --output-json --repeats --save-result"
_OF_AN_LLM = """
    --async-scheduling --attention-backend --block-size --device --dtype --enable-chunked-prefill
    --enable-prefix-caching --enforce-eager --kv-cache-memory-bytes --linear-backend --log-level
    --max-model-len --max-num-batched-tokens --max-num-seqs --no-async-scheduling
    --no-enable-chunked-prefill --no-enable-prefix-caching --no-enforce-eager
    --num-gpu-blocks-override --pipeline-parallel-size --quantization
    --scheduling-policy --seed --startup-timeout --tensor-parallel-size -pp -tp
"""
_OF_A_BENCH = {
    "latency": f"""--model --input-len --output-len --batch-size --num-iters --num-iters-warmup
        {_OF_AN_LLM}""",
    "throughput": f"""--model --input-len --output-len --num-prompts --num-warmups --dataset
        --dataset-path {_OF_AN_LLM}""",
    "serve": """--api-key --base-url --host --port --endpoint --model --header --num-prompts
        --request-rate
        --max-concurrency --input-len --output-len --dataset --dataset-path --token-ids
        --temperature --top-p --ignore-eos --no-ignore-eos --num-warmups --seed""",
    "startup": "--num-warmups",
    "wire": "--prompt-tokens --rounds",
    "ring": "--readers --rounds",
    "schedule": "--running --rounds",
}

FLAGS = {"plan": f"--json {_OF_A_SERVER}", "serve": _OF_A_SERVER}
"""A dry run takes the command line of the real one."""
FLAGS["limits"] = FLAGS["postmortem"] = "--json"
FLAGS["chaos"] = "--admin-key --dry-run --duration --interval --kinds --patience --seed --url"
FLAGS["drain"] = "--port --timeout"
FLAGS["lint k8s"] = "--json"
FLAGS["render k8s"] = f"""{_OF_A_SERVER} -o --accept --cache-claim --gpu --head-cpu --head-memory
    --image --kind --name --no-gpu --no-tls --output --overlay --queue --ray-version --tls
    --worker-cpu --worker-memory"""
FLAGS["run-batch"] = (
    "-i -o --api-key --input-file --max-concurrency --model --output-file --url "
    + (" ".join(sorted(set(_OF_A_SERVER.split()) - set(_NOT_OF_A_BATCH.split()))))
)
FLAGS["complete"] = """--api-key --max-tokens --model --model-name --quick --stats --temperature
    --url -q"""
FLAGS["chat"] = f"--system-prompt {FLAGS['complete']}"
FLAGS |= {f"bench {name}": f"{flags} {_RESULTS}" for name, flags in _OF_A_BENCH.items()}

ENVIRONMENT = """
    RAYWIRE_ADMIN_KEY RAYWIRE_API_KEY
    RAYWIRE_CACHE_DIR RAYWIRE_EXECUTE_MODEL_TIMEOUT_SECONDS RAYWIRE_LOG_LEVEL RAYWIRE_METRICS_KEY
    RAYWIRE_MQ_MAX_CHUNK_BYTES_MB RAYWIRE_RPC_BASE_PATH RAYWIRE_WORKER_MULTIPROC_METHOD
"""


def _commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{name} ")
        else:
            yield prefix + name, command


def test_commands_and_flags() -> None:
    """The flags of each command, all of them."""
    assert {
        name: sorted(
            flag
            for param in command.params
            for flag in (*param.opts, *param.secondary_opts)
            if flag.startswith("-")
        )
        for name, command in _commands(cli)
    } == {name: sorted(flags.split()) for name, flags in FLAGS.items()}


def test_variables() -> None:
    """The environment variables, all of them, each with its meaning in the help."""
    assert sorted(VARIABLES) == ENVIRONMENT.split()


ENTRIES = {
    "workers/convert.py": "a short-lived process of its own",
    "engine/leash.py": "starts such processes, and hands its own environment on",
    "workers/resources.py": "sets what torch and OpenMP read, before they are imported",
}
"""Files outside `cluster` that may look at argv or the environment, and why."""


def test_only_cluster_reads_argv_and_environment() -> None:
    """Everything else is handed its settings, so what decides can be seen in one package."""
    readers = {
        str(path.relative_to(ROOT))
        for package in ("api", "engine", "workers")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"os\.environ|os\.getenv|sys\.argv", path.read_text(encoding="utf-8"))
    }
    assert readers == set(ENTRIES)
