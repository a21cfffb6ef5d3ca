"""What makes two ranks different, and how it is told."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from engine import fingerprint
from engine.wire import PROTOCOL_VERSION


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"0" * 100)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_the_same_server_has_the_same_fingerprint(folder: Path) -> None:
    """Twice on one machine: equal, and no differences to tell."""
    ours, theirs = fingerprint.take(folder), fingerprint.take(folder)

    assert ours == theirs
    assert fingerprint.differences(ours, theirs) == []
    assert ours.protocol == PROTOCOL_VERSION
    assert ours.packages["msgspec"] == msgspec.__version__


@pytest.mark.parametrize(
    ("name", "content", "changed"),
    [
        ("config.json", "{}", "model"),
        ("model.safetensors", "0" * 101, "model"),
        ("more.safetensors", "", "model"),
        ("tokenizer.json", "[]", "tokenizer"),
        ("chat_template.jinja", "x", "tokenizer"),
        ("README.md", "x", None),
    ],
)
def test_a_changed_file_changes_its_part(
    folder: Path, name: str, content: str, changed: str | None
) -> None:
    """Configuration, weights by size, tokenizer and template count; other files do not."""
    before = fingerprint.take(folder)
    (folder / name).write_text(content)
    after = fingerprint.take(folder)

    found = fingerprint.differences(before, after)
    assert [line.split()[0] for line in found] == ([changed] if changed else [])


def test_changed_code_of_any_package_changes_the_code_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file more, a file renamed, a byte changed; what is no code does not count."""
    monkeypatch.setattr(fingerprint, "__file__", str(tmp_path / "engine" / "fingerprint.py"))
    seen = set()
    for package in fingerprint.OUR_PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("1")
        seen.add(fingerprint.take(tmp_path).code)
    (tmp_path / "workers" / "a.py").rename(tmp_path / "workers" / "b.py")
    seen.add(fingerprint.take(tmp_path).code)
    (tmp_path / "api" / "a.py").write_text("2")
    seen.add(fingerprint.take(tmp_path).code)
    assert len(seen) == 6

    (tmp_path / "api" / "notes.txt").write_text("2")
    assert fingerprint.take(tmp_path).code in seen


def test_another_package_version_is_spelled_out(folder: Path) -> None:
    """An operator reads which package differs, and both versions."""
    ours = fingerprint.take(folder)
    packages = {**ours.packages, "torch": "1.0"}
    del packages["numpy"]
    theirs = msgspec.structs.replace(ours, packages=packages)

    assert fingerprint.differences(ours, theirs) == [
        f"numpy absent instead of {ours.packages['numpy']}",
        f"torch 1.0 instead of {ours.packages['torch']}",
    ]


def test_it_is_cheap_and_imports_no_package_to_learn_its_version(folder: Path) -> None:
    """Tens of milliseconds at start-up; torch stays out of the process."""
    script = (
        "import sys; from engine import fingerprint; fingerprint.take(sys.argv[1]);"
        " sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, folder], check=False).returncode == 0

    took_s = []
    for _ in range(5):
        began = time.thread_time()  # its own work, however busy the machine is
        fingerprint.take(folder)
        took_s.append(time.thread_time() - began)
    assert min(took_s) < 0.05


def test_quantized_weights_are_another_model(folder: Path) -> None:
    """Ranks that answer from integers do not answer as others do."""
    plain, int8 = fingerprint.take(folder), fingerprint.take(folder, "int8")
    (found,) = fingerprint.differences(plain, int8)
    assert found.startswith("model ")
