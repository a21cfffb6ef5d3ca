"""The image: what its Dockerfile promises, without a Docker engine. Its build steps are run as a
script, in folders of their own."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each, comments and continued lines resolved."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    lines = (line.strip() for line in text.splitlines())
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line)
    ]


def last(word: str) -> str:
    return [rest for each, rest in instructions() if each == word][-1]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def test_it_runs_as_nobody_in_particular() -> None:
    """By number, as Kubernetes' runAsNonRoot wants it, and as the manifests say."""
    assert last("USER") == "1000:1000"
    manifest = (ROOT / "k8s" / "rayjob" / "gpu" / "rayjob.yaml").read_text()
    assert "runAsUser: 1000" in manifest


def test_bases_are_pinned_and_the_same() -> None:
    """One Python for all, and no `latest`."""
    bases = [rest.split(" ")[0] for word, rest in instructions() if word == "FROM"]
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:\$\{PYTHON\}-slim-\w+", bases[0])


def test_the_last_stage_has_no_build_tools_of_python_and_no_lists() -> None:
    """It copies what the first has installed; what apt fetched is gone."""
    final = stages()[-1]
    runs = " ".join(rest for word, rest in final if word == "RUN")
    assert "pip install" not in runs
    assert "rm -rf /var/lib/apt/lists/*" in runs
    assert "--no-install-recommends" in runs
    assert any(rest.startswith("--from=build ") for word, rest in final if word == "COPY")


def test_it_has_what_probes_and_hooks_call() -> None:
    """Every program in the commands of the manifests, and tini as the first process."""
    installed = re.findall(r"install --yes --no-install-recommends (.*?) &&", last_run())[0].split()
    assert {"curl", "procps", "tini"} <= set(installed)  # procps brings pgrep
    assert json.loads(last("ENTRYPOINT"))[0] == "tini"
    healthcheck = last("HEALTHCHECK")
    assert "/live" in healthcheck
    assert "curl" in healthcheck


def last_run() -> str:
    return next(rest for word, rest in stages()[-1] if word == "RUN")


def test_only_what_is_installed_is_sent_to_the_builder() -> None:
    """No tests, no history, nothing that lies around; and all that is copied."""
    kept = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = {
        source for word, rest in stages()[0] if word == "COPY" for source in rest.split()[:-1]
    }
    assert set(kept) == copied


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_build_steps_install_a_command_that_serves_and_renders(tmp_path: Path) -> None:
    """The first stage's steps in an environment of its own, from the files that it copies alone."""
    source = tmp_path / "src"
    source.mkdir()
    for word, rest in stages()[0]:
        if word == "COPY":
            for name in rest.split()[:-1]:
                copy(ROOT / name, source / name)
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "EXTRAS": ""}
    for step in (rest for word, rest in stages()[0] if word == "RUN"):
        # torch is where this machine's pip finds it.
        here = step.replace('--extra-index-url "${TORCH_INDEX}" ', "").replace(
            "pip install", f"{python} -m pip install --quiet"
        )
        subprocess.run(["bash", "-ec", here], cwd=source, env=environment, check=True, timeout=540)
    command = tmp_path / "venv" / "bin" / "raywire"
    for arguments in (["--version"], ["plan", "-dp", "2"], ["lint", "k8s", "--help"]):
        subprocess.run([command, *arguments], check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert sys.version_info[:2] == (3, 11) or "ARG PYTHON=3.11" in DOCKERFILE


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
