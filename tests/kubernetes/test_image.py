"""The image: what its Dockerfile promises, without a Docker engine. Its steps are run as scripts:
the build in an environment of its own, what needs root with programs that write down their words.
"""

import json
import os
import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.kubernetes import names
from tests.helpers.dockerfile import OUR_RULES, problems, rests, stages

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
BUILD, FINAL = stages(DOCKERFILE)
MANIFESTS = [yaml.safe_load(path.read_text()) for path in ROOT.glob("k8s/ray*/*/ray*.yaml")]

# ------------------------------------------------------------------------------------------- rules

MUTANTS: list[tuple[str, str, str]] = [
    ("DL3006", "python:${PYTHON}-slim-bookworm AS", "python AS"),
    ("DL3007", "python:${PYTHON}-slim-bookworm\n", "python:latest\n"),
    ("DL3002", "USER 1000:1000", "USER root"),
    ("DL3025", '["--help"]', "--help"),
    ("DL3020", "COPY api api", "ADD api api"),
    ("DL3022", "--from=build", "--from=builder"),
    ("DL3009", "    && rm -rf /var/lib/apt/lists/* \\\n", ""),
    ("DL3015", "--no-install-recommends ", ""),
    ("DL3014", "install --yes", "install"),
    ("DL3027", "apt-get install", "apt install"),
    ("DL3004", "RUN apt-get", "RUN sudo apt-get"),
    ("DL3042", "PIP_NO_CACHE_DIR=1 ", ""),
    ("DL3013", "torch==2.13.*", "torch"),
    ("DL4006", "RUN apt-get", "RUN curl https://example.org/key | apt-key add - && apt-get"),
    ("DL3000", "WORKDIR /src", "WORKDIR src"),
    ("DL3003", "RUN apt-get", "RUN cd /tmp && apt-get"),
    ("DL3011", "EXPOSE 8000", "EXPOSE 80000"),
    ("SC1072", "    && groupadd", "    && ( groupadd"),
    ("root", "USER 1000:1000\n", ""),
    ("root", "USER 1000:1000", "USER 0"),
    ("root", "USER 1000:1000", "USER raywire"),
    ("no health check", "HEALTHCHECK --interval=10s", "# HEALTHCHECK --interval=10s"),
    ("a shell", '["tini", "-g", "--", "raywire"]', "tini -g -- raywire"),
    ("a shell", '["curl", "-sf", "http://127.0.0.1:8000/live"]', "curl -sf localhost:8000/live"),
    ("secrets", "ENV RAYWIRE", "ENV HF_TOKEN=hf_x RAYWIRE"),
    ("upgrade", "RUN apt-get update", "RUN apt-get update && apt-get upgrade"),
]


def test_it_breaks_no_rule() -> None:
    assert problems(DOCKERFILE) == set()


@pytest.mark.parametrize(("rule", "good", "bad"), MUTANTS, ids=lambda text: text.strip()[:30])
def test_each_rule_can_fail(rule: str, good: str, bad: str) -> None:
    assert good in DOCKERFILE
    assert rule in problems(DOCKERFILE.replace(good, bad))


def test_each_rule_of_ours_has_a_mutant() -> None:
    assert {rule for rule, _, _ in MUTANTS} >= set(OUR_RULES)


# ---------------------------------------------------------------------------------------- promises


def templates() -> list[dict[str, Any]]:
    """Every pod template of ours."""
    clusters = [each["spec"].get("rayClusterSpec", each["spec"]) for each in MANIFESTS]
    assert len(clusters) == 4
    return [
        group["template"]["spec"]
        for cluster in clusters
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]


def argument(name: str) -> str:
    [found] = re.findall(rf"^ARG {name}=(.*)$", DOCKERFILE, re.MULTILINE)
    return str(found)


def test_head_and_workers_have_one_python_and_the_ray_that_manifests_name() -> None:
    """Both stages have the same base, and rayVersion is what the build installs."""
    assert len({stage[0].rest.split(" ")[0] for stage in (BUILD, FINAL)}) == 1
    assert '"ray[default]==${RAY}"' in rests(BUILD, "RUN")[0]
    clusters = [each["spec"].get("rayClusterSpec", each["spec"]) for each in MANIFESTS]
    assert {cluster["rayVersion"] for cluster in clusters} == {argument("RAY")}


def test_it_is_small() -> None:
    """What builds is left behind, and only what is installed is sent to the builder: no tests, no
    history, nothing that lies around."""
    assert not any("pip install" in run for run in rests(FINAL, "RUN"))
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {source for rest in rests(BUILD, "COPY") for source in rest.split()[:-1]}
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied


def test_it_has_what_probes_and_hooks_call() -> None:
    """Every program in the commands of the manifests, and tini as the first process."""
    brought = {"curl": "curl", "pgrep": "procps", "tini": "tini"}
    installed = re.findall(
        r"install --yes --no-install-recommends (.*?) &&", rests(FINAL, "RUN")[0]
    )
    commands = [
        handler["exec"]["command"][-1]
        for template in templates()
        for container in template["containers"]
        for handler in (
            *(container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")),
            container["lifecycle"]["preStop"],
        )
    ]
    called = {word for word in ("curl", "pgrep", "wget", "nc") if any(word in c for c in commands)}
    assert called <= brought.keys()
    assert {brought[word] for word in called | {"tini"}} <= set(installed[0].split())
    assert json.loads(rests(FINAL, "ENTRYPOINT")[0])[0] == "tini"
    assert "/live" in rests(FINAL, "HEALTHCHECK")[0]


# ------------------------------------------------------------------------------------------- steps


def test_its_last_step_makes_the_user_and_the_folders_of_the_manifests(tmp_path: Path) -> None:
    """Run as a script, with programs that only write down what they are asked for."""
    for program in ("apt-get", "rm", "groupadd", "useradd", "install"):
        recorder = tmp_path / program
        recorder.write_text(f'#!/bin/sh\necho "{program} $*" >> {tmp_path}/words\n')
        recorder.chmod(0o755)
    [step] = rests(FINAL, "RUN")
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", "-ec", step], env={"PATH": path}, check=True, timeout=30)

    words = (tmp_path / "words").read_text()
    assert words.startswith("apt-get update\napt-get install --yes")
    uid, gid = rests(FINAL, "USER")[0].split(":")
    assert re.search(rf"^useradd --uid {uid} --gid {gid} ", words, re.MULTILINE)
    [folders] = re.findall(rf"^install -d -o {uid} -g {gid} (.*)$", words, re.MULTILINE)
    mounted = {names.CACHE_FOLDER, "/tmp/ray"}
    assert set(folders.split()) == mounted
    for template in templates():
        context = template["securityContext"]
        user, group = str(context["runAsUser"]), str(context["runAsGroup"])
        assert (user, group) == (uid, gid)
        [container] = template["containers"]
        assert mounted <= {each["mountPath"] for each in container["volumeMounts"]}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that the first stage's steps have made, from the files that it
    copies alone. What they require is taken from here and not fetched."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "src"
    source.mkdir()
    for rest in rests(BUILD, "COPY"):
        for name in rest.split()[:-1]:
            copy(ROOT / name, source / name)
    venv.create(folder / "venv", symlinks=True)
    site = sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")})
    here = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    (Path(site) / "here.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(here)))
    scripts = folder / "venv" / "bin"
    (scripts / "pip").write_text(f'#!/bin/sh\nexec {scripts}/python -m pip "$@"\n')
    (scripts / "pip").chmod(0o755)
    environment = {
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "HOME": str(folder),
        "RAY": names.ray_version(),
        "TORCH_INDEX": argument("TORCH_INDEX"),
        "EXTRAS": "",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which pip reads as: none
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_QUIET": "1",
    }
    for step in rests(BUILD, "RUN"):
        subprocess.run(["sh", "-ec", step], cwd=source, env=environment, check=True, timeout=100)
    return scripts


@pytest.mark.slow
def test_its_build_steps_install_a_command_that_renders_and_checks(
    installed: Path, tmp_path: Path
) -> None:
    """Of their own copy of the code, with all that is no code."""
    environment = {"PATH": f"{installed}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    asked = "import cluster; print(*cluster.__path__)"
    place = subprocess.run(
        [installed / "python", "-c", asked], cwd=tmp_path, env=environment,
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    assert Path(place).is_relative_to(installed.parent)
    kept = {path.relative_to(place) for path in Path(place).rglob("*") if path.is_file()}
    wanted = {path.relative_to(ROOT / "cluster") for path in (ROOT / "cluster").rglob("*.py")}
    assert wanted <= kept

    line = "raywire render k8s some/model --gpu | raywire lint k8s -"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=tmp_path, env=environment,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 findings, 0 accepted\n"


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def test_make_image_says_what_is_in_it() -> None:
    """As `make` would run it: the Dockerfile knows each argument."""
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "image", "IMAGE=r.example/raywire:1", "EXTRAS=gguf"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert done.stdout.startswith("docker build ")
    assert done.stdout.rstrip().endswith("--tag r.example/raywire:1 .")
    given = dict(each.split("=", 1) for each in re.findall(r"--build-arg (\S+)", done.stdout))
    assert given == {"EXTRAS": "gguf", "TORCH_INDEX": argument("TORCH_INDEX")}
    assert {f"ARG {name}" for name in given} <= set(re.findall(r"ARG \w+", DOCKERFILE))
