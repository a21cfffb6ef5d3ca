"""docs/api.md, "Without a server" <-> the class: what is documented is there, and the other way."""

import ast
import inspect
import re
from pathlib import Path

import api
from api import LLM

TEXT = (Path(__file__).resolve().parents[2] / "docs/api.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("\n## Without a server: `LLM`\n")[2].partition("\n## ")[0]
PARAMETERS, METHODS = (
    re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for table in SECTION.split("| method |")
)


def test_every_parameter_is_in_the_table_and_no_other() -> None:
    """Of the constructor."""
    documented = {name for cell in PARAMETERS for name in re.findall(r"`(\w+)`", cell)}
    assert documented == inspect.signature(LLM).parameters.keys()


def test_every_method_is_in_the_table_and_no_other() -> None:
    """With parameters that it has."""
    calls = [re.fullmatch(r"(\w+)\((.*)\)", c) for m in METHODS for c in re.findall(r"`(.*?)`", m)]
    found = {call[1]: call[2].split(", ") for call in calls if call is not None}
    public = {n for n, v in vars(LLM).items() if inspect.isfunction(v) and not n.startswith("_")}
    assert found.keys() == public
    for name, parameters in found.items():
        assert {*parameters} - {""} <= inspect.signature(getattr(LLM, name)).parameters.keys()


def test_the_example_imports_what_there_is() -> None:
    """And calls it with names that there are."""
    [example] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    tree = ast.parse(example)
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert names <= set(api.__all__)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in names:
            given = {keyword.arg for keyword in call.keywords}
            assert given <= inspect.signature(getattr(api, call.func.id)).parameters.keys()
