"""Whatever a client sends has a bound, and all bounds are in one place that everybody can read."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import api.limits
import engine.limits
from api.limits import TABLE
from cluster.cli import cli
from cluster.limit_table import bound
from engine.limits import Limit
from tests.helpers.server import ROOT

FOR_OTHERS = {
    "api/body.py": "how much of a body is searched for a better error message",
    "api/brought_templates.py": "templates that are remembered",
    "api/cors.py": "how much of a name an error repeats; a status",
    "api/detokenizer.py": "tokens without a whole character that are held back",
    "api/drain_rate.py": "how long a client is told to wait",
    "api/errors.py": "a status",
    "api/guard.py": "how much of an offered key is looked at",
    "api/in_flight.py": "places where a request goes on after its rank was lost",
    "api/input_processor.py": "how much of a name an internal id repeats",
    "api/keys.py": "of the operator's own keys",
    "api/load_balancer.py": "sessions that are remembered",
    "api/prefix_index.py": "prefixes that are remembered",
    "api/request_stream.py": "outputs that wait for a slow reader, before they are merged",
    "api/responses/form.py": "a status",
    "api/responses/item_list.py": "digits that are read",
    "api/responses/lookup.py": "how much of a name an error repeats",
    "api/route_headers.py": "entries of a header that we write",
    "api/structured/ebnf.py": "characters",
    "api/structured/schema.py": "a character",
    "api/tools/converter.py": "of what a model writes",
    "api/tools/notation.py": "how a grammar is written",
    "api/tools/pythonic.py": "characters",
    "api/tools/qwen_coder.py": "how a schema is looked up",
}
"""Files with numbers that bound no field of a request, and what they are."""


def _rows() -> list[Limit]:
    return [each for limits in TABLE.values() for each in limits]


def test_the_command_prints_every_bound() -> None:
    """For people under headings, for machines as numbers."""
    text = CliRunner().invoke(cli, ["limits"], catch_exceptions=False).output
    listed = json.loads(
        CliRunner().invoke(cli, ["limits", "--json"], catch_exceptions=False).output
    )

    lines = [re.sub(r" {2,}", " | ", line.strip()) for line in text.splitlines()]
    assert [line for line in lines if line and not line.endswith(":")] == [
        " | ".join(filter(None, (each.name, bound(each), each.what, each.flag))) for each in _rows()
    ]
    assert [(each["name"], each["most"]) for each in listed] == [(e.name, e.most) for e in _rows()]


def test_the_document_has_the_same_table() -> None:
    """`docs/api.md`, section "Limits"."""
    section = (ROOT / "docs/api.md").read_text(encoding="utf-8").split("\n## Limits\n")[1]
    table = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")]
    assert table[1:] == list(_markdown())


def _markdown() -> Iterator[str]:
    for group, limits in TABLE.items():
        yield f"| **{group}** | | |"
        for each in limits:
            flag = f"`{each.flag}`" if each.flag else ""
            yield f"| {each.name} | {bound(each)} | {'; '.join(filter(None, (each.what, flag)))} |"


@pytest.mark.parametrize("module", [api.limits, engine.limits], ids=["api", "engine"])
def test_every_bound_has_a_row(module: object) -> None:
    """A number that is checked and not shown would surprise somebody."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")  # type: ignore[attr-defined]
    names = re.findall(r"^([A-Z][A-Z_]+) = ", source, re.MULTILINE)
    shown = {each.most for each in _rows()} | {each.least for each in _rows()}
    groups = {"RANGES", "SAMPLING", "GRAMMARS"}
    hidden = {"MAX_UNFINISHED_BODIES", "MAX_STORED_RESPONSES"}  # a factor; the bound of a flag
    assert len(names) > 15
    for name in set(names) - groups - hidden:
        assert getattr(module, name) in shown, name


def test_no_bound_stands_elsewhere() -> None:
    """A number that somebody writes into a check would be in no table."""
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "api").rglob("*.py"))
        for line in _bounds(ast.parse(path.read_text(encoding="utf-8")))
        if path.name != "limits.py" and str(path.relative_to(ROOT)) not in FOR_OTHERS
    }
    assert found == set(), "put it into api/limits.py, or say in FOR_OTHERS what it is"


def test_each_exception_is_one() -> None:
    """A file that has no such number any more is not excused."""
    for name in FOR_OTHERS:
        assert list(_bounds(ast.parse((ROOT / name).read_text(encoding="utf-8")))), name


def _bounds(tree: ast.Module) -> Iterator[int]:
    """Lines with a constant called MAX_…, a comparison with a large number, or such a repetition
    in an expression."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if re.match(r"_?(MAX|LONGEST|MOST)_", name) and _is_number(value):
                    yield node.lineno
            case ast.Compare(comparators=values):
                if any(_is_number(value) and _size(value) >= 64 for value in values):
                    yield node.lineno
            case ast.Call(func=ast.Name(id="check_range"), args=[_, _, *edges]):
                if any(_is_number(edge) and _size(edge) > 1 for edge in edges):
                    yield node.lineno


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
    return False


def _size(node: ast.expr) -> float:
    """Of a literal; a product or a power is meant to be large."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return abs(value)
        case ast.UnaryOp(operand=operand):
            return _size(operand)
    return float("inf")
