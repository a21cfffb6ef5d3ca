"""Which tests prove that raywire survives a fault, or withstands an attack.

`tests/data/rows.json` has the faults (F-…) and attacks (S-…), a line each; a test names those that
it proves with `@pytest.mark.row("F-29")`. `python -m tests.rows` prints the map, and `--write` puts
the faults into docs/reliability.md, where `test_rows.py` looks for them, and the attacks into
docs/security.md.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.bench.document import write_into

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "reliability.md"
SECURITY = TESTS.parent / "docs" / "security.md"
ROWS: dict[str, str] = json.loads((TESTS / "data" / "rows.json").read_text(encoding="utf-8"))

REASONS: dict[str, str] = {
    "F-19": "raywire starts no Ray cluster that outlives its command, and is a client of one that"
    " has a store; the command lives on the head in a job, and ends with it either way.",
}
"""Rows that no test proves, and why: a sentence for docs/reliability.md or docs/security.md."""

BEGIN = "<!-- tests: written by `python -m tests.rows --write` -->"
END = "<!-- end of tests -->"


def marks_in(tree: ast.AST) -> Iterator[str]:
    """The arguments of all `….row(…)` below a node."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="row"), args=args):
                yield from (str(ast.literal_eval(arg)) for arg in args)


def marked_tests(source: str) -> Iterator[tuple[str, str]]:
    """Row and test function, for each mark of a module: on a function, on one of its cases, or in
    `pytestmark`, which counts for all of its functions."""
    body = ast.parse(source).body
    common: set[str] = set()
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                common |= set(marks_in(value))
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in functions:
        if node.name.startswith("test_"):
            own = {row for decorator in node.decorator_list for row in marks_in(decorator)}
            yield from ((row, node.name) for row in sorted(own | common))


@cache
def proofs() -> dict[str, tuple[str, ...]]:
    """The tests of each row that has any, as `folder/file.py::test_name`."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        source = file.read_text(encoding="utf-8")
        if ".row(" in source:
            for row, name in marked_tests(source):
                found.setdefault(row, []).append(f"{file.relative_to(TESTS)}::{name}")
    return {row: tuple(tests) for row, tests in sorted(found.items())}


def as_list(kind: str) -> str:
    """The rows of a kind, `F` or `S`, with their tests or the reason why there are none."""
    lines = []
    for row, what in ROWS.items():
        if row.startswith(kind):
            lines.append(f"- **{row}** {what}")
            tests = proofs().get(row, ())
            lines.extend(f"  - `{test}`" for test in tests)
            if not tests:
                lines.append(f"  - no test: {REASONS.get(row, 'not yet')}")
    return "\n".join(lines)


def section(kind: str) -> str:
    """What the document of a kind has between its two marks, these included."""
    return f"{BEGIN}\n\n{as_list(kind)}\n\n{END}\n"


def main() -> None:
    """Print the map, or write it."""
    parser = argparse.ArgumentParser(prog="python -m tests.rows", description=__doc__)
    parser.add_argument("--write", action="store_true", help="into the documents")
    if parser.parse_args().write:
        write_into(DOCUMENT, section("F"))
        write_into(SECURITY, section("S"))
    else:
        sys.stdout.write(f"{as_list('F')}\n{as_list('S')}\n")


if __name__ == "__main__":
    main()
