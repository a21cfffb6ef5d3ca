"""The environments that clients are tested in."""

import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import Client, NotToBeHad, clean_environment, interpreter

pytestmark = pytest.mark.slow


def local_package(folder: Path) -> Client:
    """A client that pip builds from a folder, without a network."""
    source = folder / "source"
    source.mkdir()
    (source / "greeting.py").write_text("TEXT = 'hello'\n")
    (source / "pyproject.toml").write_text(
        '[project]\nname = "greeting"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (source / "backend.py").write_text(BACKEND)
    return Client("greeting", (f"greeting @ {source.as_uri()}",))


BACKEND = """
import zipfile

def build_wheel(folder, settings=None, metadata=None):
    name = "greeting-1.0-py3-none-any.whl"
    about = "greeting-1.0.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("greeting.py")
        head = "Metadata-Version: 2.1\\nName: greeting\\nVersion: 1.0\\n"
        wheel.writestr(f"{about}/METADATA", head)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr(f"{about}/RECORD", "")
    return name
"""


def imported(python: Path, code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(python), "-c", code],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd="/",
        check=False,
    )


def test_has_the_client_and_nothing_of_ours(tmp_path: Path) -> None:
    """What it depends on is what pip brings, not what the tests happen to have."""
    python = interpreter(local_package(tmp_path), tmp_path)

    assert imported(python, "import greeting; print(greeting.TEXT)").stdout == "hello\n"
    for name in ("pytest", "openai", "engine"):
        assert "ModuleNotFoundError" in imported(python, f"import {name}").stderr


def test_is_made_once(tmp_path: Path) -> None:
    """The next run finds it; one that was left half made is made anew."""
    client = local_package(tmp_path)
    python = interpreter(client, tmp_path)
    marker = python.parent / "marker"
    marker.touch()

    assert interpreter(client, tmp_path) == python
    assert marker.exists()

    (python.parents[1] / "complete").unlink()
    assert interpreter(client, tmp_path) == python
    assert not marker.exists()


def test_a_package_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told from one that cannot be installed."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NotToBeHad, match=r"nobody: pip says: .*nobody==1\.0"):
        interpreter(Client("nobody", ("nobody==1.0",)), tmp_path)

    client = local_package(tmp_path)
    (tmp_path / "source" / "backend.py").write_text("def build_wheel(): pass\n")
    with pytest.raises(AssertionError, match="cannot install"):
        interpreter(client, tmp_path)
