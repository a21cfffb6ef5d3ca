"""Model folders without a tokenizer.json get one, and then are as good as others."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from api import LLM, SamplingParams, StructuredOutputsParams
from api.tokenizer import Tokenizer
from cluster.model_source import find, resolve
from cluster.tokenizer_source import with_tokenizer
from engine.errors import ConfigError
from engine.fingerprint import take
from engine.grammar import vocabulary
from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.tiny_tokenizers import byte_level

TEXT = "the dog </s> Größe 漢字"


def old_folder(folder: Path) -> Path:
    """With vocab.json and merges.txt, as GPT-2 had them."""
    folder.mkdir()
    byte_level().model.save(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # slow to import: only for tests that compare

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = old_folder(tmp_path_factory.mktemp("old") / "model")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5]}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def made(old: Path, cache: Path) -> Path:
    return resolve(str(old), cache_dir=cache)


def test_its_tokens_are_those_of_transformers(old: Path, made: Path) -> None:
    """And all that the folder says beside them still holds."""
    tokenizer = Tokenizer.load(made)

    assert tokenizer.encode(TEXT) == auto_tokenizer(old).encode(TEXT)
    assert tokenizer.eos_token == "</s>"
    assert 5 in tokenizer.eos_token_ids
    assert tokenizer.chat_templates == {"default": "{{ messages }}", "tools": "{{ tools }}"}
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert not (old / "tokenizer.json").exists()


def test_the_engine_reads_the_same_tokens(old: Path, made: Path) -> None:
    """So answers can be given a form; and ranks on other nodes see that theirs are equal."""
    tokenizer = Tokenizer.load(made)
    read = vocabulary.load(made, tokenizer.vocab_size)

    assert read.vocab_size == tokenizer.vocab_size
    assert take(made).model == take(old).model
    assert take(made).tokenizer != take(old).tokenizer


def test_it_is_converted_once(old: Path, made: Path, cache: Path) -> None:
    """Again when a file has changed, and never for a look (`raywire plan`)."""
    written = (made / "tokenizer.json").stat().st_mtime_ns
    assert resolve(str(old), cache_dir=cache) == made
    assert (made / "tokenizer.json").stat().st_mtime_ns == written
    assert find(str(old), cache_dir=cache) == old

    (old / "new.json").write_text("{}")
    assert (resolve(str(old), cache_dir=cache) / "new.json").is_file()


def test_folders_that_need_nothing_are_taken_as_they_are(tmp_path: Path) -> None:
    """Those with a tokenizer.json, and those that nothing can be made of."""
    plain = tmp_path / "plain"
    plain.mkdir()
    assert with_tokenizer(plain, tmp_path / "cache") == plain
    (plain / "vocab.json").write_text("{}")
    (plain / "tokenizer.json").write_text("{}")
    assert with_tokenizer(plain, tmp_path / "cache") == plain
    assert not (tmp_path / "cache").exists()


def test_what_cannot_be_converted_is_told_in_one_line(tmp_path: Path) -> None:
    """And leaves nothing behind, so that the next start tries again."""
    folder = old_folder(tmp_path / "model")
    (folder / "vocab.json").write_text("{")

    with pytest.raises(ConfigError) as caught:
        resolve(str(folder), cache_dir=tmp_path / "cache")

    words = str(caught.value)
    assert words.startswith(f"{folder} has no tokenizer.json, and transformers cannot make one: ")
    assert "\n" not in words
    assert not [each for each in (tmp_path / "cache" / "models").iterdir() if each.is_dir()]


def test_a_conversion_ends_with_its_parent(tmp_path: Path) -> None:
    """No process is left when the server that wanted the tokenizer is killed."""
    command = [sys.executable, "-m", "cluster.convert_tokenizer", str(tmp_path), str(tmp_path)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        process.stdin.close()  # type: ignore[union-attr]  # the leash, let go of

        assert process.wait(60) == -9


@pytest.mark.slow
def test_answers_of_such_a_model_have_the_form_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a 400: the engine looked for a file that was not there."""
    monkeypatch.setenv("RAYWIRE_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("RAYWIRE_CACHE_DIR", str(tmp_path / "cache"))
    folder = make_scripted_model(tmp_path / "models", kind="echo")
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"})
    )

    form = StructuredOutputsParams(choice=["yes", "no"])
    with LLM(str(folder), max_model_len=200) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=form)
        (result,) = llm.generate("perhaps", params, use_tqdm=False)

    assert result.outputs[0].text in ("yes", "no")
