"""The public JSON-Schema-Test-Suite against our compiler: what is accepted, refused, unsupported.

    python -m tests.helpers.json_schema_suite     # the table of docs/api.md

The suite comes with the source distribution of the `jsonschema` package, fetched by pip. Each of
its schemas is compiled as a request's would be, and each of its instances spelled as JSON is
followed byte by byte. A schema that the compiler refuses, with an error that says why, counts as
unsupported: the client knows, and nothing wrong is generated.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from llguidance import LLMatcher

from engine.grammar import source
from engine.grammar.vocabulary import Vocabulary
from engine.structured_output import StructuredOutput

PACKAGE = "jsonschema==4.26.0"
DRAFT = "draft2020-12"


class Instance(msgspec.Struct):
    data: msgspec.Raw
    valid: bool
    description: str = ""


class Case(msgspec.Struct):
    """A schema, and what is valid under it and what is not."""

    schema: msgspec.Raw
    tests: list[Instance]
    description: str = ""


@dataclass
class Tally:
    """Of the instances of one keyword."""

    num_unsupported: int = 0
    num_right: int = 0
    refused_valid: list[str] = field(default_factory=list)
    accepted_invalid: list[str] = field(default_factory=list)

    @property
    def num_supported(self) -> int:
        return self.num_right + len(self.refused_valid) + len(self.accepted_invalid)

    def add(self, other: "Tally") -> None:
        self.num_unsupported += other.num_unsupported
        self.num_right += other.num_right
        self.refused_valid += other.refused_valid
        self.accepted_invalid += other.accepted_invalid


def fetch(folder: Path) -> Path:
    """Download the package that carries the suite.

    Raises:
        subprocess.CalledProcessError: pip cannot.
    """
    options = ["--quiet", "--no-deps", "--no-binary", "jsonschema", "--dest", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, PACKAGE],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return next(folder.glob("jsonschema-*.tar.gz"))


def read(archive: Path) -> Iterator[tuple[str, list[Case]]]:
    """Yield each keyword and its cases; those of optional keywords are left out."""
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda each: each.name):
            path = Path(member.name)
            if path.match(f"*/json/tests/{DRAFT}/*.json") and (file := files.extractfile(member)):
                yield path.stem, msgspec.json.decode(file.read(), type=list[Case])


def run(archive: Path) -> dict[str, Tally]:
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)], [], 256)
    tallies: dict[str, Tally] = {}
    for keyword, cases in read(archive):
        tally = tallies[keyword] = Tally()
        for case in cases:
            tally.add(_run_case(vocabulary, case))
    return tallies


def _run_case(vocabulary: Vocabulary, case: Case) -> Tally:
    tally = Tally()
    matcher = _compile(vocabulary, bytes(case.schema).decode())
    if matcher is None:
        tally.num_unsupported = len(case.tests)
        return tally
    for instance in case.tests:
        name = f"{case.description}: {instance.description}"
        is_accepted = _accepts(matcher, _spelled(instance.data))
        if is_accepted == instance.valid:
            tally.num_right += 1
        elif instance.valid:
            tally.refused_valid.append(name)
        else:
            tally.accepted_invalid.append(name)
    return tally


def _compile(vocabulary: Vocabulary, schema: str) -> LLMatcher | None:
    try:
        grammar = source.grammar_of(StructuredOutput("json_schema", schema))
    except ValueError:
        return None
    matcher = LLMatcher(vocabulary.ll, grammar, log_level=0, limits=source.limits())
    matcher.compute_bitmask()
    return None if matcher.is_error() else matcher


def _accepts(matcher: LLMatcher, text: str) -> bool:
    matcher = matcher.deep_copy()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def _spelled(data: msgspec.Raw) -> str:
    """As a model would write it; not in ASCII alone."""
    return json.dumps(json.loads(bytes(data)), ensure_ascii=False)


def table(tallies: dict[str, Tally]) -> str:
    """Markdown, a keyword a line, and all of them."""
    head = (
        "| keyword | instances | of refused schemas | right | valid, refused | invalid, accepted |"
    )
    whole = Tally()
    for tally in tallies.values():
        whole.add(tally)
    rows = [_row(f"`{keyword}`", tally) for keyword, tally in tallies.items()]
    return "\n".join([head, "|---" * 6 + "|", *rows, _row("all", whole), ""])


def _row(name: str, tally: Tally) -> str:
    counts = (
        tally.num_supported + tally.num_unsupported,
        tally.num_unsupported,
        tally.num_right,
        len(tally.refused_valid),
        len(tally.accepted_invalid),
    )
    return f"| {name} | " + " | ".join(map(str, counts)) + " |"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(table(run(fetch(Path(folder)))))
