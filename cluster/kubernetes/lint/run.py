"""From files to findings, and to what people and machines read."""

import dataclasses
from collections.abc import Sequence
from typing import TextIO

import yaml

from cluster.kubernetes.lint import ray_rules, security_rules, server_rules
from cluster.kubernetes.lint.findings import Finding, apply
from cluster.kubernetes.lint.workload import KINDS, Bundle
from engine.errors import ConfigError

RULES = (*server_rules.RULES, *ray_rules.RULES, *security_rules.RULES)


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
    bundle = Bundle([each for each in documents if isinstance(each, dict)])
    if not bundle.workloads:
        raise ConfigError(f"nothing to check: no {' or '.join(KINDS)} in these files")
    return list(apply(RULES, bundle))


def show(findings: Sequence[Finding]) -> str:
    """For people."""
    num_accepted = sum(finding.accepted is not None for finding in findings)
    count = f"{len(findings) - num_accepted} findings, {num_accepted} accepted"
    return "\n".join([*map(str, findings), count])


def to_json(findings: Sequence[Finding]) -> list[dict[str, str | None]]:
    """For machines."""
    return [dataclasses.asdict(finding) for finding in findings]
