"""A model folder is data: no way of reading one runs what lies in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.model_source import resolve
from engine.errors import ConfigError
from tests.helpers.scripted_models import make_scripted_model
from tests.helpers.server import ROOT, running_server
from tests.helpers.tiny_gguf import write_gguf
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_tokenizers import byte_level
from workers.supported import check_model_folder

AUTO_MAP = {
    "AutoConfig": "trap.Trap",
    "AutoFeatureExtractor": "trap.Trap",
    "AutoImageProcessor": "trap.Trap",
    "AutoModel": "trap.Trap",
    "AutoModelForCausalLM": "trap.Trap",
    "AutoProcessor": "trap.Trap",
    "AutoTokenizer": ["trap.Trap", "trap.Trap"],
}
CONFIGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json"),
    *("preprocessor_config.json", "adapter_config.json", "special_tokens_map.json"),
)


class Trap:
    """Python files that leave a mark when they are imported, under every name that transformers
    looks for, and configurations that point to them."""

    def __init__(self, folder: Path, marks: Path) -> None:
        marks.mkdir()
        self._marks = marks
        code = f"open({str(marks)!r} + '/' + __name__.replace('/', '.'), 'w')\nclass Trap: ...\n"
        (folder / "custom_generate").mkdir()
        for name in ("trap.py", "__init__.py", "custom_generate/generate.py"):
            (folder / name).write_text(code)
        for name in CONFIGS:
            file = folder / name
            content = json.loads(file.read_text()) if file.is_file() else {}
            for part in (content, content.get("text_config"), content.get("vision_config")):
                if isinstance(part, dict):
                    part["auto_map"] = AUTO_MAP
            file.write_text(json.dumps(content))

    def assert_untouched(self) -> None:
        assert os.listdir(self._marks) == []


def answer_of(folder: Path) -> str:
    """What a server of this model says, started with the flags that everybody has."""
    with running_server(str(folder), "--dtype", "float32") as server, server.http() as client:
        body = {"model": str(folder), "prompt": "The quick", "max_tokens": 2}
        done = client.post("/v1/completions", json=body)
        assert done.status_code == 200, done.text
        chat = {"model": str(folder), "messages": [{"role": "user", "content": "x"}]}
        assert client.post("/tokenize", json=chat).status_code == 200
        return str(done.json()["choices"][0]["text"])


def with_parts(folder: Path) -> Path:
    """A Gemma 3 whose text model is the part of a larger one, as in the ones with images."""
    text = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.row("S-11")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_code_in_a_model_folder_is_not_run(kind: str, tmp_path: Path) -> None:
    """Config, tokenizer, processor, the parts of a larger model: a server starts and answers, and
    nothing in the folder has been imported, though every file points to it (CVE-2026-22807)."""
    folder = tiny_model(kind, tmp_path)
    if kind == "gemma3":
        with_parts(folder)
    trap = Trap(folder, tmp_path / "marks")

    answer_of(folder)

    trap.assert_untouched()


@pytest.mark.slow
@pytest.mark.row("S-11")
def test_code_is_not_run_where_a_tokenizer_is_converted(tmp_path: Path) -> None:
    """Folders without a tokenizer.json are read by transformers' own code, and no other."""
    folder = tmp_path / "model"
    folder.mkdir()
    byte_level().model.save(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    trap = Trap(folder, tmp_path / "marks")

    made = resolve(str(folder), cache_dir=tmp_path / "cache")

    assert (made / "tokenizer.json").is_file()
    trap.assert_untouched()


@pytest.mark.slow
@pytest.mark.row("S-11")
def test_code_is_not_run_beside_a_gguf(tmp_path: Path) -> None:
    """Nor where the folder of a GGUF file has configurations as well."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_gguf(tiny_model("qwen2", tmp_path), folder / "m.gguf")
    trap = Trap(folder, tmp_path / "marks")

    made = resolve(str(folder / "m.gguf"), cache_dir=tmp_path / "cache")

    assert check_model_folder(made) == "qwen2"
    trap.assert_untouched()


@pytest.mark.slow
def test_the_trap_would_snap(tmp_path: Path) -> None:
    """With remote code allowed, transformers imports it: the tests above could fail."""
    folder = tiny_model("llama", tmp_path)
    trap = Trap(folder, tmp_path / "marks")
    code = (
        "import sys, transformers\n"
        "transformers.AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    environ = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(folder)]
    subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=False, timeout=100)

    with pytest.raises(AssertionError):
        trap.assert_untouched()


@pytest.mark.row("S-10")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    """The file is named, and it is not opened: here nobody could."""
    folder = make_scripted_model(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / name).mkdir()

    with pytest.raises(ConfigError, match=rf"{name} is a pickle.* never loaded: use .*safetensors"):
        check_model_folder(folder)


@pytest.mark.row("S-10")
def test_an_index_that_names_pickles_is_refused(tmp_path: Path) -> None:
    """A safetensors index may name what it likes: other files are not weights."""
    folder = make_scripted_model(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    index = {"weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")

    with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
        check_model_folder(folder)
