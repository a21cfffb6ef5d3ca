"""What keeps a server from starting: one clear line, exit code 2, quickly, and nothing left."""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.http_socket import listen
from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import ROOT, session_processes, wait_for


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def refuse(*args: str, timeout_s: float = 60.0) -> tuple[str, float]:
    """Run `serve` until it gives up; the line it says, and the seconds of processor time it took,
    with those of its children: the wall's prove nothing on a crowded machine."""
    before_s = children_s()
    with tempfile.TemporaryDirectory(prefix="rw-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster", "serve", *args],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        assert not list(Path(folder).iterdir())
    # Above an error of the model it would read as a success.
    assert "listening" not in errors or "workers started" in errors
    seconds = children_s() - before_s
    assert process.returncode == 2, errors
    assert "Traceback" not in errors
    wait_for(lambda: not session_processes(process.pid), "the end of its children")
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert errors.splitlines()[-1] == line
    assert errors.count(line.removeprefix("error: ")) == 1
    return line, seconds


@pytest.mark.row("F-44")
def test_a_port_in_use() -> None:
    """Within 2 s of work, before the model is even looked for."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        line, seconds = refuse("no/such-model", "--host", "127.0.0.1", "--port", str(port))

    assert line == (
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use;"
        " choose another --port"
    )
    assert seconds < 2


def missing(folder: Path) -> None:
    (folder / "config.json").unlink()
    folder.rmdir()


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_architecture(folder: Path) -> None:
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


def without_weights(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def without_a_shard(folder: Path) -> None:
    without_weights(folder)
    index = {"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001.safetensors").touch()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing, "does not exist"),
        (without_config, "no config.json"),
        (broken_config, "cannot read"),
        (unknown_architecture, "'mamba' (MambaForCausalLM); supported are"),
        (without_weights, "no *.safetensors"),
        (without_a_shard, "1 of 2 weight files"),
    ],
)
def test_a_model_folder_that_cannot_work(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    """Missing, incomplete or unknown: found before any process is started."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    damage(folder)

    line, _ = refuse(str(folder), "--port", "0")

    assert words in line


def test_weights_too_large_for_memory(tmp_path: Path) -> None:
    """Their size and what is free, before a byte of them is read; although one alone is larger
    than any machine."""
    folder = make_scripted_model(tmp_path)  # for its tokenizer
    shape = {"vocab_size": 260, "hidden_size": 1 << 22, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    (folder / "model.safetensors").touch()

    line, _ = refuse(str(folder), "--port", "0")

    assert re.search(r"the model's weights needs \d{7}\.\d\d GiB .* GiB are available", line)


def test_a_cache_too_large_for_memory(tmp_path: Path) -> None:
    """What only a worker finds out travels up as its message: no traceback on the way."""
    folder = make_scripted_model(tmp_path, kind="echo")

    line, _ = refuse(str(folder), "--port", "0", "--kv-cache-memory-bytes", "4K")

    assert "KV" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-tp", "3"), "--tensor-parallel-size 3 does not divide the model's 4 attention heads"),
        (("-pp", "9"), "--pipeline-parallel-size 9 is more than the model's 2 layers"),
        (("--max-model-len", "8K"), "--max-model-len 8192 must be from 1 to 4096"),
        (("--kv-cache-memory-bytes", "16M"), "lower --max-model-len to"),
    ],
)
def test_a_model_that_contradicts_the_flags(
    tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    """Its config.json says so: nothing has been started, and no weight has been read."""
    folder = make_scripted_model(tmp_path)  # for its tokenizer
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    (folder / "model.safetensors").touch()

    line, seconds = refuse(str(folder), "--port", "0", *flags)

    assert words in line
    assert seconds < 3.5  # an engine core and its workers would take twice as long


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("-dp", "2"),
        ("-dp", "2", "--api-server-count", "1"),
        ("-dp", "2", "--on-engine-death", "replace"),
    ],
    ids=lambda flags: " ".join(flags) or "alone",
)
def test_a_script_that_cannot_work(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A mistake that only workers can see, said once, however many see it."""
    folder = make_scripted_model(tmp_path, kind="tokens", token_ids=[])

    line, _ = refuse(str(folder), "--port", "0", *flags)

    assert "needs token_ids" in line
