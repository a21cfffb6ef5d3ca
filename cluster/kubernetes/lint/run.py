"""From files to findings, and to what people and machines read."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TextIO

import yaml

from cluster.kubernetes import names
from cluster.kubernetes.lint import ray_rules, security_rules, server_rules
from cluster.kubernetes.lint.findings import Finding, Mistake, Rule, apply
from cluster.kubernetes.lint.workload import KINDS, Bundle, Document, Workload
from engine.errors import ConfigError


def _accepted(workload: Workload, _: Bundle) -> Iterator[Mistake]:
    known = {rule.name for rule in RULES}
    place = f"annotation {names.ACCEPTED_ANNOTATION}"
    for name, reason in workload.accepted.items():
        if name not in known:
            yield Mistake(place, f"{name!r} is no rule")
        elif not reason:
            yield Mistake(place, f"{name} has no reason")


RULES = (
    *server_rules.RULES,
    *ray_rules.RULES,
    *security_rules.RULES,
    Rule(
        name="accepted",
        why="nothing is accepted by a word that is misspelt, or that nobody can judge later",
        fix="lines of `rule: reason`",
        check=_accepted,
    ),
)


def check_files(files: Sequence[TextIO]) -> list[Finding]:
    """Check the documents of all files together.

    Raises:
        ConfigError: one is no YAML, or there is nothing to check.
    """
    documents: list[object] = []
    for file in files:
        try:
            documents += yaml.safe_load_all(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file.name} is not YAML: {error}") from error
    return check(documents)


def check(documents: Sequence[object]) -> list[Finding]:
    """Check documents that are applied together.

    Raises:
        ConfigError: there is nothing to check.
    """
    bundle = Bundle([each for document in documents for each in _items(document)])
    if not bundle.workloads:
        kinds = sorted({str(each.get("kind")) for each in bundle.documents})
        found = f", only {', '.join(kinds)}" if kinds else ""
        raise ConfigError(f"nothing to check: no {' or '.join(KINDS)} in these files{found}")
    return list(apply(RULES, bundle))


def _items(document: object) -> Iterator[Document]:
    """The document, or those of a list, as `kubectl get -o yaml` has it."""
    if not isinstance(document, dict):
        return
    if str(document.get("kind")).endswith("List") and isinstance(document.get("items"), list):
        yield from (each for each in document["items"] if isinstance(each, dict))
    else:
        yield document


def show(findings: Sequence[Finding]) -> str:
    """For people: what one rule has found, and then once why and what to do."""
    lines: list[str] = []
    for _, found in itertools.groupby(findings, key=lambda finding: finding.rule):
        same = list(found)
        lines += map(str, same)
        if any(finding.accepted is None for finding in same):
            lines += [f"    why: {same[0].why}", f"    fix: {same[0].fix}"]
    num_accepted = sum(finding.accepted is not None for finding in findings)
    num_others = len(findings) - num_accepted
    count = f"{num_others} finding{'s' * (num_others != 1)}, {num_accepted} accepted"
    return "\n".join([*lines, count])


def to_json(findings: Sequence[Finding]) -> list[dict[str, str | None]]:
    """For machines."""
    return [dataclasses.asdict(finding) for finding in findings]
