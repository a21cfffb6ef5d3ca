"""The four packages: found where they should be, and complete when installed."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import api
import cluster
import engine
import workers
from tests.helpers.server import ROOT

PACKAGES = (api, cluster, engine, workers)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_each_package_is_this_checkouts(package: object) -> None:
    """Their names are plain, so another one of that name could stand in the way."""
    assert Path(str(package.__file__)).parents[1] == ROOT  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_wheel_has_all_files_of_the_packages(tmp_path: Path) -> None:
    """Modules and data (templates, kernels) of the four packages, and nothing else of the tree."""
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package.__name__, source / package.__name__, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    flags = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(source)], check=True)
    [wheel] = tmp_path.glob("raywire-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert packed == {
        str(path.relative_to(source))
        for package in PACKAGES
        for path in (source / package.__name__).rglob("*")
        if path.is_file()
    }
