"""Every command in docs/kubernetes.md is one: bash can read it, its flags exist, and those that
need no cluster are run."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from cluster.cli import cli
from cluster.kubernetes import names
from cluster.kubernetes.lint.run import check
from tests.helpers.kube_schema import problems

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
SCRIPTS = Path(sysconfig.get_path("scripts"))
PROGRAMS = {
    "kubectl",
    "raywire",
    "make",
    "ray",
    "curl",
    "helm",
    "openssl",
    "kind",
    "export",
    "base64",
}
BLOCKS = re.findall(r"```console\n(.*?)```", DOCUMENT, re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ") for block in BLOCKS for line in block.splitlines() if line.strip()
]


def parts(command: str) -> list[list[str]]:
    """The programs of a pipeline, each with its words."""
    words = shlex.split(command, comments=True)
    found: list[list[str]] = [[]]
    for word in words:
        if word == "|":
            found.append([])
        elif word in (">", ">>"):
            break
        else:
            found[-1].append(word)
    return found


def of(program: str) -> list[list[str]]:
    return [part[1:] for command in COMMANDS for part in parts(command) if part[0] == program]


def test_each_line_is_a_command_that_bash_can_read() -> None:
    assert len(COMMANDS) > 20
    for command in COMMANDS:
        subprocess.run(["bash", "-n", "-c", command], check=True, timeout=10)
        assert {part[0] for part in parts(command)} <= PROGRAMS, command


@lru_cache
def kubectl_help(*words: str) -> str:
    done = [
        subprocess.run(
            [SCRIPTS / "kubectl", *each], capture_output=True, text=True, timeout=30, check=True
        ).stdout
        for each in ([*words, "--help"], ["options"])
    ]
    return "\n".join(done)


@pytest.mark.parametrize("words", of("kubectl"), ids=" ".join)
def test_kubectl_knows_each_flag(words: list[str]) -> None:
    """By the help of the subcommand, of a real kubectl."""
    if "--" in words:
        words = words[: words.index("--")]
    depth = 3 if words[:2] == ["create", "secret"] else 2 if words[0] == "create" else 1
    known = kubectl_help(*words[:depth])
    for word in words[depth:]:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            assert re.search(rf"(^|[\s,]){re.escape(flag)}[=,:\s]", known), word


@pytest.mark.parametrize("words", of("raywire"), ids=" ".join)
def test_our_own_commands_take_what_they_are_given(words: list[str], tmp_path: Path) -> None:
    """`render` is run; the others are parsed."""
    if words[:2] == ["render", "k8s"]:
        words = [str(tmp_path) if word == "deploy" else word for word in words]
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 0, result.output + str(result.exception)
        return
    command: click.Command = cli
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, words
        command, words = found, words[1:]
    command.make_context("raywire", list(words), resilient_parsing=False)


def needs_no_cluster(part: str) -> bool:
    match shlex.split(part):
        case ["kubectl", "kustomize", *_] | ["raywire", "lint", *_] | ["openssl", *_]:
            return True
        case ["kubectl", "create", "secret", *words]:
            return "--dry-run=client" in words
    return False


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_what_needs_no_cluster_is_run(tmp_path: Path) -> None:
    """In their order, and pipelines as far as they need none."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    environment = {"PATH": f"{SCRIPTS}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    printed = []
    for command in COMMANDS:
        run = " | ".join(itertools.takewhile(needs_no_cluster, command.split(" | ")))
        if run:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", run], cwd=tmp_path, env=environment,
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{run}: {done.stdout}{done.stderr}"
            printed.append(done.stdout)

    assert any("0 findings, 2 accepted" in each for each in printed)
    [secret] = [yaml.safe_load(each) for each in printed if "kind: Secret" in each]
    assert problems(secret) == []
    assert len((tmp_path / "api-keys").read_text().split()) == 2  # the old and the new


def test_patches_are_what_kustomize_takes(tmp_path: Path) -> None:
    """The overlay that the page shows, beside ours."""
    [overlay] = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    folder = tmp_path / "k8s" / "rayjob" / "ours"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(overlay)
    built = subprocess.run(
        [SCRIPTS / "kubectl", "kustomize", folder],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    documents = list(yaml.safe_load_all(built))

    assert [problem for each in documents for problem in problems(each)] == []
    assert check(documents) == []
    [job] = [each for each in documents if each["kind"] == "RayJob"]
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert "nodeSelector" in groups[0]["template"]["spec"]
    assert "PodMonitor" in {each["kind"] for each in documents}


def test_what_ray_runs_is_a_command_of_ours(tmp_path: Path) -> None:
    """`ray job submit … -- ` what the RayCluster says, with the flags of a real one."""
    [submit] = [words for words in of("ray") if words[:2] == ["job", "submit"]]
    asked = submit[submit.index("--") + 1 :]
    assert "{.metadata.annotations." + names.ENTRYPOINT_ANNOTATION.replace(".", r"\.") in asked[-1]
    manifest = yaml.safe_load((ROOT / "k8s/raycluster/cpu-demo/raycluster.yaml").read_text())
    said = manifest["metadata"]["annotations"][names.ENTRYPOINT_ANNOTATION]
    shell, *own = shlex.split(said)
    serve = cli.get_command(click.Context(cli), "serve")
    assert serve is not None
    assert [shell, *own[:2]] == ["exec", "raywire", "serve"]
    keys = tmp_path / "api-keys"  # in a pod the Secret's; here a file must be there
    keys.write_text("a" * 32)
    serve.make_context("serve", [str(keys) if "/keys/" in word else word for word in own[2:]])
    known = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    for word in submit[2 : submit.index("--")]:
        if word.startswith("--"):
            assert word in known


def test_the_overlays_that_are_named_are_there() -> None:
    for folder in re.findall(r"k8s/[a-z]+/[a-z-]+", DOCUMENT.replace("k8s/rayjob/ours", "")):
        assert (ROOT / folder / "kustomization.yaml").exists(), folder


def test_make_knows_its_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in of("make"):
        assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE)
        for word in words[1:]:
            assert re.search(rf"^{word.partition('=')[0]} \?=", makefile, re.MULTILINE)
