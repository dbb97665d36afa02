"""Imports run downward only, the core knows no transport by name, and modules stay small: read from the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import HANGS

from aiocomms import lowlevel

ROOT = Path(__file__).parents[2]
CORE = ROOT / "aiocomms"
TRANSPORTS = sorted((ROOT / "transports").glob("*/aiocomms_*/"))
EXAMPLES = sorted((ROOT / "examples").glob("transport_*/"))

# The order of imports is written once, in docs/design.md: a room may import from those before it.
ORDER = re.search(r"^errors < .*$", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE).group()
LAYERS = [set(rooms.split(", ")) for rooms in ORDER.split(" < ")]
FOR_TRANSPORTS = {"errors", "ops", "shortcuts", "transport", "lowlevel", "cuda"}

MODULE_LINES = 400
OF_HOSTS = {"ray": "ray", "torch_transport": "torch.distributed._transport"}
"""Rooms that cannot be imported without a host, which `make test-hosts` has."""
FUNCTION_LINES = 30
TABLES = {"misfits"}  # functions that are one table, with a line for each case


class Import(NamedTuple):
    """One imported module, and whether it is for type checkers only."""

    name: str
    types_only: bool


def sources(*roots: Path) -> list[Path]:
    return sorted(path for root in roots for path in root.rglob("*.py"))


def module_name(path: Path) -> str:
    """``aiocomms.ops._p2p`` for its file."""
    top = CORE if CORE in path.parents else next(root for root in TRANSPORTS if root in path.parents)
    return ".".join(path.relative_to(top.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[Import]:
    """Every import of a module, inside functions too."""

    def walk(node: ast.AST, types_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, types_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} line {node.lineno}: a relative import"
            yield Import(node.module or "", types_only)
            yield from (Import(f"{node.module}.{alias.name}", types_only) for alias in node.names)
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, types_only or (guarded and child in node.body))

    return walk(ast.parse(path.read_text()), types_only=False)


MODULES = {module_name(path) for path in sources(CORE)}


def core_imports(path: Path, *, types: bool = True) -> Iterator[str]:
    """The modules of the core that a module imports, for type checkers too."""
    for name, types_only in imports(path):
        if types_only and not types:
            continue
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES and module != "aiocomms":
            yield module


def room(module: str) -> str:
    """The first level below ``aiocomms``: ``ops`` for ``aiocomms.ops._p2p``."""
    return module.split(".")[1]


def layer(module: str) -> int:
    return next(i for i, rooms in enumerate(LAYERS) if room(module) in rooms)


ROOMS = {room(name) for name in MODULES if name != "aiocomms"} - {"pytest_plugin"}  # which anybody's pytest loads


def test_the_order_names_every_room():
    assert set().union(*LAYERS) == ROOMS


@pytest.mark.parametrize("path", [p for p in sources(CORE) if p.parent != CORE or p.stem in ROOMS], ids=module_name)
def test_imports_run_downward(path):
    me = module_name(path)
    assert {name for name in core_imports(path) if layer(name) > layer(me)} == set()


def test_no_import_goes_round():
    """Neither by imports within a room, nor within functions, nor for type checkers."""
    graph: dict[str, set[str]] = {}
    for path in sources(CORE):
        me = module_name(path)
        if me not in {"aiocomms", "aiocomms.pytest_plugin"}:  # which load what they name when it is asked for
            graph[me] = {name for name in core_imports(path) if name != me and not me.startswith(f"{name}.")}
    while leaves := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert graph == {}


@pytest.mark.parametrize("path", sources(*TRANSPORTS, *EXAMPLES), ids=lambda path: path.parent.name + "." + path.stem)
def test_a_transport_imports_the_toolkit_and_nothing_else_of_the_core(path):
    modules = set(core_imports(path))
    assert {room(name) for name in modules} <= FOR_TRANSPORTS
    assert not any(name.startswith("aiocomms.lowlevel.") for name in modules), "its modules may change; it does not"
    others = {i.name.split(".")[0] for i in imports(path)} & {root.name for root in TRANSPORTS}
    assert others <= set(path.relative_to(ROOT).parts)


def test_the_toolkit_offers_what_it_describes():
    described = set(re.findall(r":(?:class|func|data):`(\w+)`", lowlevel.__doc__))
    assert described == set(lowlevel.__all__)
    assert all(getattr(lowlevel, name).__doc__ for name in described - {"LOOPBACK", "MAX_RECORD"})


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """The strings that stand alone as statements: docstrings, of attributes too."""
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


@pytest.mark.parametrize("path", sources(CORE), ids=lambda path: module_name(path))
def test_the_core_knows_no_transport_by_name(path):
    tree = ast.parse(path.read_text())
    names = {entry.name for entry in entry_points(group="aiocomms.transports")} | {
        root.parent.name for root in TRANSPORTS
    }
    words = (names | {"ucx", "nccl", "gloo"}) - {"local"}  # which is a word of its own
    told = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in told:
            assert node.value not in names
            assert not any(word in node.value.lower() for word in words), node.value
        elif isinstance(node, (ast.Name, ast.Attribute, ast.FunctionDef, ast.ClassDef, ast.arg)):
            name = str(next(getattr(node, field) for field in ("id", "attr", "name", "arg") if hasattr(node, field)))
            assert not any(word in name.lower() for word in words), name
    assert not any(i.name.split(".")[0].startswith("aiocomms_") for i in imports(path))


@pytest.mark.parametrize("path", sources(CORE, *TRANSPORTS), ids=lambda path: module_name(path))
def test_modules_and_functions_are_small(path):
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= MODULE_LINES
    tree = ast.parse(text)
    told = {line for node in docstrings(tree) for line in range(node.lineno, node.end_lineno + 1)}
    code = {n for n, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")} - told
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = len(code & set(range(node.lineno, node.end_lineno + 1)))
            assert length <= FUNCTION_LINES or node.name in TABLES, f"{node.name} has {length} lines of code"


@pytest.mark.parametrize("path", sources(CORE, *TRANSPORTS), ids=lambda path: module_name(path))
def test_docstrings_describe_parameters_that_there_are(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            described = [text.split(":")[0] for text in (ast.get_docstring(node) or "").split(":param ")[1:]]
            a = node.args
            given = [arg.arg for arg in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if arg is not None]
            assert described == [name for name in given if name in described], node.name


@pytest.mark.processes
def test_every_module_can_be_imported_first():
    """A circle of imports shows only when a module of it comes first."""
    absent = {CORE / room for room, host in OF_HOSTS.items() if find_spec(host) is None}
    paths = [path for path in sources(CORE, *TRANSPORTS) if path.name != "__main__.py" and path.parent not in absent]
    modules = [module_name(path) for path in paths]
    script = f"""
import importlib, sys
import anyio, msgspec, torch, torch.distributed  # not ours, and slow
clean = set(sys.modules)
for name in {modules!r}:
    importlib.import_module(name)
    for loaded in set(sys.modules) - clean:
        # A native module stays in the process anyway.
        if loaded.split(".")[0].startswith("aiocomms") and sys.modules[loaded].__file__.endswith(".py"):
            del sys.modules[loaded]
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANGS, check=False)
    assert result.returncode == 0, result.stderr
