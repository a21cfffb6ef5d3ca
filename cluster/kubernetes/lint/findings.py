"""What is wrong with a manifest, for people."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cluster.kubernetes.lint.workload import Bundle, Workload


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake."""

    rule: str
    where: str
    """Kind, name, and place in the document."""
    what: str
    why: str
    fix: str
    accepted: str | None = None
    """Why it is meant, by the manifest's own annotation."""

    def __str__(self) -> str:
        if self.accepted is not None:
            return f"accepted {self.rule}: {self.where}: {self.what} (accepted: {self.accepted})"
        return f"{self.rule}: {self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Mistake:
    """What a rule says of one place."""

    place: str
    what: str


Check = Callable[[Workload, Bundle], Iterable[Mistake]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A name to accept it by, one sentence why, one what to do, and the check."""

    name: str
    why: str
    fix: str
    check: Check


def apply(rules: Sequence[Rule], bundle: Bundle) -> Iterator[Finding]:
    """All findings about all workloads, by workload and rule."""
    for workload in bundle.workloads:
        for rule in rules:
            yield from _apply(rule, workload, bundle)


def _apply(rule: Rule, workload: Workload, bundle: Bundle) -> list[Finding]:
    try:
        mistakes = list(rule.check(workload, bundle))
    except (AttributeError, TypeError, ValueError):
        # Whether a manifest has the right shape is for the cluster's own schema to say.
        mistakes = [Mistake("document", "cannot be checked: a field is of the wrong kind")]
    return [
        Finding(
            rule.name,
            f"{workload.title}: {mistake.place}",
            mistake.what,
            rule.why,
            rule.fix,
            workload.accepted.get(rule.name) or None,
        )
        for mistake in mistakes
    ]
