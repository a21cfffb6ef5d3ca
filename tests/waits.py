"""Finds every call that may wait without a limit in our four packages. Used by
`tests/faults/test_waits.py`, which has the reasons of those that may.

A call counts by its name and arguments, since nobody can tell types apart here: `x.wait()`,
`x.join()`, `x.result()`, `x.get()`, `x.recv()`, `x.poll()` and the like without a timeout, as well
as `ray.get(…)`, `ray.wait(…)`, `asyncio.wait(…)`, `connection.wait(…)`, `condition.wait_for(…)`
without one.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("api", "cluster", "engine", "workers")

_BARE = frozenset(
    {
        "wait", "join", "result", "get", "recv", "recv_bytes", "recv_multipart", "recv_handle",
        "poll", "acquire", "communicate", "select", "accept", "term",
    }
)  # fmt: skip
"""Wait for ever when called without an argument."""

_WITH_ARGUMENTS = {("ray", "get"), ("ray", "wait"), ("asyncio", "wait"), ("connection", "wait")}
"""Of modules: wait for ever without `timeout`."""

_TIMEOUTS = frozenset({"timeout", "timeout_s"})


def waits_in(source: str) -> Iterator[tuple[str, str]]:
    """Function and call, for each call of a module that may wait without a limit."""
    yield from _waits_below(ast.parse(source), ())


def _waits_below(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = path
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*path, child.name)
        if isinstance(child, ast.Call) and _is_unlimited(child):
            yield ".".join(path), ast.unparse(child)
        yield from _waits_below(child, inside)


def _is_unlimited(call: ast.Call) -> bool:
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    if any(keyword.arg in _TIMEOUTS for keyword in call.keywords):
        return False
    match function.value:
        case ast.Name(id=module) if (module, function.attr) in _WITH_ARGUMENTS:
            return True
    if function.attr == "wait_for":
        return len(call.args) < 2
    return function.attr in _BARE and not call.args and not call.keywords


def all_waits() -> dict[str, list[str]]:
    """The calls of all packages, as `file::function`. Benchmarks are left out: a person watches
    them."""
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if "bench" not in file.parts:
                for function, call in waits_in(file.read_text(encoding="utf-8")):
                    place = f"{file.relative_to(ROOT)}::{function}"
                    found.setdefault(place, []).append(call)
    return found
