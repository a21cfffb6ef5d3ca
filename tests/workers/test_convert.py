"""A GGUF file becomes a folder that servers can load, by the real converter process."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.helpers.tiny_gguf import write_gguf
from tests.helpers.tiny_models import tiny_model
from workers.supported import check_model_folder

TIMEOUT_S = 100


@contextmanager
def converter(target: Path, *parts: Path) -> Iterator["subprocess.Popen[str]"]:
    """The process as `cluster.model_source` starts it."""
    with subprocess.Popen(
        [sys.executable, "-m", "workers.convert", str(target), *(str(part) for part in parts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    assert process.stdout is not None
    output = process.stdout.read()
    return process.wait(TIMEOUT_S), output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """A model folder, the same as GGUF, and the weights that are in the GGUF."""
    directory = tmp_path_factory.mktemp("gguf")
    model = tiny_model("qwen2", directory)
    file = directory / "tiny.gguf"
    return model, file, write_gguf(model, file)


def test_two_conversions_at_once_give_one_complete_folder(
    tiny: tuple[Path, Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """Weights, tokenizer and config are those of the file, with a chat template if it had none. The
    file may come in pieces."""
    model, file, weights = tiny
    target = tmp_path / "models" / "converted"
    whole, parts = file.read_bytes(), [tmp_path / "tiny.part0", tmp_path / "tiny.part1"]
    parts[0].write_bytes(whole[:10_000])
    parts[1].write_bytes(whole[10_000:])

    with converter(target, *parts) as one, converter(target, *parts) as other:
        assert finish(one) == (0, "")
        assert finish(other) == (0, "")

    assert check_model_folder(target) == "qwen2"
    converted = load_file(target / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(converted[name], torch.from_numpy(weight).bfloat16()), name
    before, after = (
        Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (model, target)
    )
    text = "The quick naïve 你好 <eos>"
    assert after.encode(text).ids == before.encode(text).ids
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 1
    assert "Assistant:" in (target / "chat_template.jinja").read_text()
    assert len({file.stat().st_mode for file in target.iterdir()}) == 1
    assert {file.name for file in target.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    assert not (tmp_path / "models" / ".converted.draft").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\x03\x04 not a model", "is no GGUF file: it does not begin with the letters GGUF"),
        (b"", "is no GGUF file: it is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "stands for a file of Git LFS: `git lfs pull` fetches it",
        ),
    ],
    ids=["another", "empty", "of Git LFS"],
)
def test_a_file_that_is_no_gguf_is_refused_in_one_line(
    content: bytes, says: str, tmp_path: Path
) -> None:
    """In words. Nothing is imported or written for it."""
    file = tmp_path / "model.gguf"
    file.write_bytes(content)

    with converter(tmp_path / "out", file) as process:
        exit_code, output = finish(process)

    assert exit_code == 2
    assert output == f"model.gguf {says}\n"
    assert not (tmp_path / "out").exists()


def test_an_unknown_architecture_is_refused_in_one_line(
    tiny: tuple[Path, Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """The line names what the file holds, before its weights are read."""
    write_gguf(tiny[0], tmp_path / "falcon.gguf", architecture="falcon")

    with converter(tmp_path / "out", tmp_path / "falcon.gguf") as process:
        exit_code, output = finish(process)

    assert exit_code == 2
    assert output.startswith("falcon.gguf holds architecture 'falcon'; supported are ")
    assert not (tmp_path / "out").exists()


def test_a_truncated_file_is_refused_in_one_line(
    tiny: tuple[Path, Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """A download that stopped half way ends in a message, not in a model."""
    whole = tiny[1].read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])

    with converter(tmp_path / "out", tmp_path / "half.gguf") as process:
        exit_code, output = finish(process)

    assert exit_code == 2
    assert output.startswith("cannot convert half.gguf: ")
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_converter_ends_with_its_parent(
    tiny: tuple[Path, Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """No process is left when the server that wanted the model is killed."""
    with converter(tmp_path / "out", tiny[1]) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == -9

    assert not (tmp_path / "out").exists()
