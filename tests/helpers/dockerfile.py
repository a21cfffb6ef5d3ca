"""What is wrong with a Dockerfile: what `hadolint` finds, which knows most of it and reads shell,
and what it leaves to others."""

import json
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HADOLINT = Path(sysconfig.get_path("scripts")) / "hadolint"


class Instruction(NamedTuple):
    word: str
    rest: str
    """Without comments, continued lines joined."""


Stage = Sequence[Instruction]
"""From a FROM to the next."""


def stages(text: str) -> list[list[Instruction]]:
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    lines = (line.strip().partition(" ") for line in text.splitlines() if line.strip())
    found: list[list[Instruction]] = []
    for word, _, rest in lines:
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append(Instruction(word, rest.strip()))
    return found


def rests(stage: Stage, word: str) -> list[str]:
    return [each.rest for each in stage if each.word == word]


def problems(text: str) -> set[str]:
    """Names of the rules that it breaks."""
    done = subprocess.run(
        [HADOLINT, "--format", "json", "--no-fail", "-"],
        input=text, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    found = stages(text)
    ours = {name for name, check in OUR_RULES.items() if any(check(found))}
    return {str(each["code"]) for each in json.loads(done.stdout)} | ours


# -------------------------------------------------------------------------------------- our rules


def _is_root(found: Sequence[Stage]) -> Iterator[str]:
    """Or has a name, which Kubernetes' runAsNonRoot cannot judge."""
    users = rests(found[-1], "USER")
    if not users or not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[-1]):
        yield "USER"


def _has_no_health_check(found: Sequence[Stage]) -> Iterator[str]:
    if len(rests(found[-1], "HEALTHCHECK")) != 1:
        yield "HEALTHCHECK"


def _has_a_shell(found: Sequence[Stage]) -> Iterator[str]:
    """In front of what is to get signals, or to be asked every few seconds."""
    commands = rests(found[-1], "ENTRYPOINT")
    commands += [rest.partition("CMD ")[2] for rest in rests(found[-1], "HEALTHCHECK")]
    yield from (command for command in commands if not command.startswith("["))


def _holds_secrets(found: Sequence[Stage]) -> Iterator[str]:
    """`docker history` shows them."""
    for stage in found:
        for rest in [*rests(stage, "ENV"), *rests(stage, "ARG")]:
            if re.search(r"(TOKEN|SECRET|PASSWORD|API_KEY)\w*=", rest):
                yield rest


def _upgrades(found: Sequence[Stage]) -> Iterator[str]:
    """What the next build does to another version."""
    for stage in found:
        yield from (run for run in rests(stage, "RUN") if re.search(r"apt(-get)? upgrade", run))


OUR_RULES: dict[str, Callable[[Sequence[Stage]], Iterator[str]]] = {
    "root": _is_root,
    "no health check": _has_no_health_check,
    "a shell": _has_a_shell,
    "secrets": _holds_secrets,
    "upgrade": _upgrades,
}
