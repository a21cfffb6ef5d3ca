"""What no file of ours may contain, found in the syntax tree rather than in the text: ways in which
bytes from elsewhere become code, and ways in which a port becomes somebody else's.

A rule has a snippet that it must refuse, so that it cannot be lost unnoticed; what is allowed all
the same has its file and its reason below, and an entry that is not needed any more fails.
"""

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "cluster", "engine", "workers")

UNPICKLING = {
    *("_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle"),
    *("shelve", "xmlrpc"),
}
"""Modules that make objects, and thereby calls, of bytes."""

YAML_AS_DATA = {"yaml.safe_load", "yaml.safe_load_all", "yaml.safe_dump", "yaml.dump"}
"""What may be called of YAML, whose other loaders make objects."""

OBJECT_CHANNELS = {
    "concurrent.futures.ProcessPoolExecutor",
    "logging.config.listen",
    "logging.handlers.DatagramHandler",
    "logging.handlers.SocketHandler",
    "multiprocessing.JoinableQueue",
    "multiprocessing.Manager",
    "multiprocessing.Pool",
    "multiprocessing.Queue",
    "multiprocessing.SimpleQueue",
    "multiprocessing.connection.Client",
    "multiprocessing.connection.Listener",
}
"""They pickle whatever they carry."""

SHELLS = {
    "asyncio.create_subprocess_shell",
    "os.popen",
    "os.system",
    "pty.spawn",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}
OPEN_TEMPLATES = {
    "jinja2.Environment",
    "jinja2.Template",
    "jinja2.environment.Environment",
    "jinja2.nativetypes.NativeEnvironment",
    "jinja2.sandbox.SandboxedEnvironment",
}
DYNAMIC_IMPORTS = {"__import__", "importlib.import_module", "runpy.run_module"}
UNTYPED = {"msgspec.json.decode", "msgspec.msgpack.decode"}


@dataclass(frozen=True)
class Source:
    """A file, and what its names stand for."""

    tree: ast.Module
    names: Mapping[str, str] = field(default_factory=dict)
    """Local name to what it was imported as: `np` to `numpy`, `load` to `torch.load`."""

    @classmethod
    def parse(cls, text: str) -> "Source":
        tree = ast.parse(text)
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return cls(tree, names)

    def imported(self) -> Iterator[tuple[str, int]]:
        """Each module that is imported, and the line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        for name, call in self.calls():
            if name in DYNAMIC_IMPORTS and call.args and isinstance(call.args[0], ast.Constant):
                yield str(call.args[0].value), call.lineno

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Each call, and the full name of what is called: `numpy.load`; `?.recv` of an object."""
        for call in self._calls:
            yield self.path(call.func), call

    @functools.cached_property
    def _calls(self) -> list[ast.Call]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]

    def path(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.path(node.value)}.{node.attr}"
        return "?"


Lines = Iterator[int]


def imports_what_unpickles(source: Source) -> Lines:
    yield from (line for name, line in source.imported() if name.partition(".")[0] in UNPICKLING)


def loads_pickled_tensors(source: Source) -> Lines:
    for name, call in source.calls():
        is_pickled = any(keyword.arg == "allow_pickle" for keyword in call.keywords)
        if is_pickled or name in (
            "torch.load",
            "torch.jit.load",
            "numpy.load",
            "pandas.read_pickle",
        ):
            yield call.lineno


def reads_objects_from_yaml(source: Source) -> Lines:
    for name, call in source.calls():
        if name.startswith("yaml.") and name not in YAML_AS_DATA:
            yield call.lineno


def evaluates(source: Source) -> Lines:
    """A parser that evaluates what a model has said runs it."""
    forbidden = ("eval", "exec", "compile", "ast.literal_eval", "code.interact")
    yield from (call.lineno for name, call in source.calls() if name in forbidden)


def carries_objects(source: Source) -> Lines:
    """ZeroMQ's helpers, multiprocessing's queues, and `recv` without a number of bytes, which on a
    pipe of multiprocessing unpickles."""
    for name, call in source.calls():
        is_pipe = name.endswith(".recv") and not call.args and not call.keywords
        if name in OBJECT_CHANNELS or name.endswith("_pyobj") or is_pipe:
            yield call.lineno


def uses_a_shell(source: Source) -> Lines:
    for name, call in source.calls():
        shell = [keyword.value for keyword in call.keywords if keyword.arg == "shell"]
        if name in SHELLS or any(_is_not_false(value) for value in shell):
            yield call.lineno


def renders_without_the_sandbox(source: Source) -> Lines:
    yield from (call.lineno for name, call in source.calls() if name in OPEN_TEMPLATES)


def trusts_code_of_models(source: Source) -> Lines:
    """Whatever reads a model folder through transformers says no, in so many words."""
    for name, call in source.calls():
        said = [k.value for k in call.keywords if k.arg == "trust_remote_code"]
        reads = name.endswith(".from_pretrained") or name.endswith(".from_config")
        if any(map(_is_not_false, said)) or (reads and not said):
            yield call.lineno


def imports_by_a_name_made_up_at_run_time(source: Source) -> Lines:
    for name, call in source.calls():
        if name in DYNAMIC_IMPORTS and not (call.args and isinstance(call.args[0], ast.Constant)):
            yield call.lineno


def decodes_without_a_type(source: Source) -> Lines:
    """msgspec makes what the type says, and of extension types nothing, unless it has a hook."""
    for name, call in source.calls():
        given = {keyword.arg for keyword in call.keywords}
        if (name in UNTYPED and "type" not in given) or "ext_hook" in given:
            yield call.lineno


def binds_a_port(source: Source) -> Lines:
    """A port that is picked, released and bound later may be another's by then."""
    for name, call in source.calls():
        is_address = bool(call.args) and isinstance(call.args[0], ast.Tuple)
        if name == "socket.create_server" or (name.endswith(".bind") and is_address):
            yield call.lineno
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and "free_port" in node.name:
            yield node.lineno


def makes_a_name_for_a_file_that_is_not_there(source: Source) -> Lines:
    yield from (call.lineno for name, call in source.calls() if name == "tempfile.mktemp")


def _is_not_false(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and value.value is False)


Rule = Callable[[Source], Lines]

REFUSED: dict[Rule, tuple[str, ...]] = {
    imports_what_unpickles: (
        "import pickle",
        "from cloudpickle import loads",
        "import dill as json",
        "def f():\n    import marshal",
        "import importlib\nimportlib.import_module('shelve')",
        "__import__('pickle')",
    ),
    loads_pickled_tensors: (
        "import torch\ntorch.load('x')",
        "from torch import load as read\nread('x', weights_only=True)",
        "import numpy as np\nnp.load('x')",
        "f(x, allow_pickle=True)",
    ),
    reads_objects_from_yaml: (
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import unsafe_load as read\nread(text)",
        "import yaml\nyaml.full_load_all(text)",
    ),
    evaluates: (
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'eval')",
        "import ast\nast.literal_eval(text)",
        "from ast import literal_eval as parse\nparse(text)",
    ),
    carries_objects: (
        "socket.recv_pyobj()",
        "self._socket.send_pyobj(x, copy=False)",
        "connection.recv()",
        "import multiprocessing as mp\nmp.Queue()",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()",
        "from multiprocessing.connection import Listener\nListener()",
        "import logging.config\nlogging.config.listen()",
    ),
    uses_a_shell: (
        "import subprocess\nsubprocess.run(x, shell=True)",
        "subprocess.Popen(x, shell=is_shell)",
        "import os\nos.system(x)",
        "from os import popen\npopen(x)",
        "import asyncio\nasyncio.create_subprocess_shell(x)",
    ),
    renders_without_the_sandbox: (
        "import jinja2\njinja2.Template(x)",
        "from jinja2 import Environment\nEnvironment()",
        "from jinja2 import sandbox\nsandbox.SandboxedEnvironment()",  # may change what it is given
    ),
    trusts_code_of_models: (
        "AutoConfig.from_pretrained(x)",
        "AutoTokenizer.from_pretrained(x, trust_remote_code=True)",
        "AutoModel.from_config(x, trust_remote_code=flag)",
        "f(trust_remote_code=1)",
    ),
    imports_by_a_name_made_up_at_run_time: (
        "import importlib\nimportlib.import_module(name)",
        "__import__(f'{name}')",
        "import runpy\nrunpy.run_module(name)",
    ),
    decodes_without_a_type: (
        "import msgspec\nmsgspec.msgpack.decode(x)",
        "from msgspec import json\njson.decode(x)",
        "msgspec.msgpack.Decoder(T, ext_hook=f)",
    ),
    binds_a_port: (
        "s.bind(('', 0))",
        "import socket\nsocket.create_server(address)",
        "def find_free_port(): ...",
    ),
    makes_a_name_for_a_file_that_is_not_there: ("import tempfile\ntempfile.mktemp()",),
}

PASSED: dict[Rule, str] = {
    imports_what_unpickles: "from multiprocessing import reduction\nimport json",
    loads_pickled_tensors: "import json\njson.load(f)",
    reads_objects_from_yaml: "import yaml\nyaml.safe_load(text)",
    evaluates: "import re\nre.compile(x)\nmodel.eval()\ncompiler.compile(x)",
    carries_objects: "socket.recv(zmq.NOBLOCK)\nconnection.recv_bytes()\nqueue.SimpleQueue()",
    uses_a_shell: "subprocess.run([x], shell=False)",
    renders_without_the_sandbox: "jinja2.sandbox.ImmutableSandboxedEnvironment()",
    trusts_code_of_models: "AutoConfig.from_pretrained(x, trust_remote_code=False)",
    imports_by_a_name_made_up_at_run_time: "import importlib\nimportlib.import_module('json')",
    decodes_without_a_type: "import msgspec\nmsgspec.json.decode(x, type=T)",
    binds_a_port: "socket.bind('ipc://x')\nself.client.bind(wires)",
    makes_a_name_for_a_file_that_is_not_there: "import tempfile\ntempfile.mkdtemp()",
}

ALLOWED: dict[tuple[Rule, str], str] = {
    (carries_objects, "workers/side_channel.py"): "a ZeroMQ socket's, which gives bytes",
    (imports_by_a_name_made_up_at_run_time, "cluster/model_source.py"): (
        "a constant of ours: the package with the demo's weights, an extra that may be missing"
    ),
    (imports_by_a_name_made_up_at_run_time, "workers/lean_imports.py"): (
        "a constant of ours: the part of torch that was left out, for whoever wants it after all"
    ),
    (binds_a_port, "engine/bound.py"): "where wires are bound, and held until they are served",
    (binds_a_port, "cluster/http_socket.py"): "where the HTTP port is",
    (binds_a_port, "cluster/demo_keeper.py"): (
        "Ray takes numbers, not sockets; the demo's own cluster, on a developer's machine"
    ),
    (binds_a_port, "cluster/bench/server_process.py"): (
        "for vLLM's server, which is measured beside ours and takes a number"
    ),
}
"""What a file may do all the same, and why."""


@functools.cache
def sources() -> dict[str, Source]:
    """Every file of the four packages."""
    return {
        str(file.relative_to(ROOT)): Source.parse(file.read_text(encoding="utf-8"))
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
    }


@functools.cache
def findings(rule: Rule) -> dict[str, list[int]]:
    """File to lines."""
    found = {file: sorted(rule(source)) for file, source in sources().items()}
    return {file: lines for file, lines in found.items() if lines}


RULES = pytest.mark.parametrize("rule", REFUSED, ids=lambda rule: rule.__name__)


@pytest.mark.row("S-01", "S-13", "S-56")
@RULES
def test_no_file_of_ours_breaks_the_rule(rule: Rule) -> None:
    """But for those that are listed, with a reason."""
    allowed = {file for each, file in ALLOWED if each is rule}
    assert {f: lines for f, lines in findings(rule).items() if f not in allowed} == {}


@RULES
def test_what_is_allowed_is_still_needed(rule: Rule) -> None:
    """An exception that nobody uses would let the next one through."""
    allowed = {file for each, file in ALLOWED if each is rule}
    assert allowed <= set(findings(rule))


@RULES
def test_the_rule_can_be_broken(rule: Rule) -> None:
    """Each snippet is refused, and what only looks like it is not."""
    for snippet in REFUSED[rule]:
        assert list(rule(Source.parse(snippet))), snippet
    assert not list(rule(Source.parse(PASSED[rule])))
