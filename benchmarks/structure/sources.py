"""The modules of a checkout, read and not imported: their folders, imports, private names and classes."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]


class Import(NamedTuple):
    """One imported name, and where the import stands."""

    name: str
    types_only: bool
    in_function: bool


class Members(NamedTuple):
    """Names that a class and its bases define."""

    attributes: set[str]
    methods: set[str]


class Module:
    """One file."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.tree = ast.parse(path.read_text())

    def imports(self) -> Iterator[Import]:
        """Every import, of ``a.b.c`` for ``from a.b import c`` too."""

        def walk(node: ast.AST, types_only: bool, in_function: bool) -> Iterator[Import]:
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, types_only, in_function) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (Import(f"{node.module}.{alias.name}", types_only, in_function) for alias in node.names)
            in_function = in_function or isinstance(node, Function | ast.Lambda)
            guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
            for child in ast.iter_child_nodes(node):
                yield from walk(child, types_only or child in guarded, in_function)

        return walk(self.tree, types_only=False, in_function=False)

    @cached_property
    def private(self) -> set[str]:
        """Private names that are defined here: functions, classes, variables, attributes, slots."""
        return {name for node in ast.walk(self.tree) for name in _defined(node) if is_private(name)}

    def private_uses(self) -> Iterator[str]:
        """Private names that may be another module's, once for each place."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
                    yield node.attr
            elif isinstance(node, ast.ImportFrom):
                yield from (alias.name for alias in node.names if is_private(alias.name))


def is_private(name: str) -> bool:
    """Of the form ``_name``."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        if isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:
            yield node.attr
    elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets):
        yield from (c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant) and isinstance(c.value, str))


class Checkout:
    """A tree of the project, of any layout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.core = self._read(root / "aiocomms")
        packages = sorted((root / "transports").glob("*/aiocomms_*/__init__.py"))
        self.transports = {init.parent.parent.name: self._read(init.parent) for init in packages}
        self.tests = self._read(root / "tests")

    def _read(self, package: Path) -> dict[str, Module]:
        modules = {}
        for path in sorted(package.rglob("*.py")):
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            modules[name] = Module(name, path)
        return modules

    def folders(self) -> dict[str, int]:
        """Modules per folder."""
        library = [*self.core.values(), *(m for modules in self.transports.values() for m in modules.values())]
        found: dict[str, int] = {}
        for module in [*library, *(m for m in self.tests.values() if m.path.parent == self.root / "tests")]:
            folder = f"{module.path.parent.relative_to(self.root)}/"
            found[folder] = found.get(folder, 0) + 1
        return found

    def core_imports(self, module: Module, *, types: bool, functions: bool) -> set[str]:
        """Modules of the core that a module imports. The core's door loads its names when they are asked for."""
        names = {
            found.name
            for found in module.imports()
            if (types or not found.types_only) and (functions or not found.in_function)
        }
        homes = {name if name in self.core else name.rpartition(".")[0] for name in names}
        return {home for home in homes if home in self.core} - {"aiocomms", module.name}

    def graph(self, *, types: bool = False, functions: bool = False, testing: bool = True) -> Graph:
        """Which module of the core imports which."""
        return {
            name: self.core_imports(module, types=types, functions=functions)
            for name, module in self.core.items()
            if name != "aiocomms" and (testing or not name.startswith("aiocomms.testing"))
        }

    def private_uses(self, modules: Collection[Module]) -> list[str]:
        """Places where modules use private names of others, as ``module: name``."""
        library = [self.core, *self.transports.values()]
        owners = {name for package in library for module in package.values() for name in module.private}
        return [f"{m.name}: {name}" for m in modules for name in m.private_uses() if name in owners - m.private]

    def members(self, name: str) -> Members:
        """Of a class of the core."""
        classes = {n.name: n for m in self.core.values() for n in m.tree.body if isinstance(n, ast.ClassDef)}
        found, left, seen = Members(set(), set()), [name], set()
        while left:
            cls = classes.get(left.pop())
            if cls is not None and cls.name not in seen:
                seen.add(cls.name)
                _add_members(cls, found)
                left += [n.id if isinstance(n, ast.Name) else n.attr for base in cls.bases for n in _named(base)]
        return found


def _named(base: ast.expr) -> list[ast.Name | ast.Attribute]:
    """The class that a base names: ``p2p.P2P``, or ``Generic`` for ``Generic[T]``."""
    base = base.value if isinstance(base, ast.Subscript) else base
    return [base] if isinstance(base, ast.Name | ast.Attribute) else []


def _add_members(cls: ast.ClassDef, found: Members) -> None:
    for statement in cls.body:
        found.attributes.update(_variables(statement))
        if isinstance(statement, Function):
            is_property = any("property" in ast.unparse(decorator) for decorator in statement.decorator_list)
            (found.attributes if is_property else found.methods).add(statement.name)


def _variables(statement: ast.stmt) -> Iterator[str]:
    """What a statement of a class's body adds: ``x``, what ``__slots__`` lists, and in a method ``self.x``."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        yield from (name for name in _defined_in(statement) if not name.startswith("__"))
    elif isinstance(statement, Function):
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute):
                yield from _defined(node)


def _defined_in(statement: ast.stmt) -> Iterator[str]:
    return (name for node in ast.walk(statement) for name in _defined(node))


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Sets of more than one module that reach each other."""
    reach = {name: _reached(graph, name) for name in graph}
    found = {tuple(sorted({n for n in reach[name] if name in reach[n]})) for name in graph}
    return sorted(list(circle) for circle in found if circle)


def _reached(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    seen: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += graph[name]
    return seen


def floors(graph: Mapping[str, Collection[str]]) -> int:
    """Modules in the longest chain of imports; a circle is one."""
    home = {name: circle[0] for circle in circles(graph) for name in circle}
    below: Graph = {}
    for name, needs in graph.items():
        below.setdefault(home.get(name, name), set()).update(home.get(need, need) for need in needs)
    for name, needs in below.items():
        needs.discard(name)
    found = 0
    while below:
        ground = {name for name, needs in below.items() if not needs & below.keys()}
        below = {name: needs for name, needs in below.items() if name not in ground}
        found += 1
    return found


class Engine(NamedTuple):
    """The C++ class."""

    data: set[str]
    methods: set[str]
    friends: set[str]


def engine(root: Path) -> Engine | None:
    """The class ``Engine``; None where there is none."""
    header = next((root / "transports" / "ucx" / "src").rglob("engine.hpp"), None)
    text = "" if header is None else re.sub(r'//.*|/\*(.|\n)*?\*/|"(\\.|[^"\\])*"', "", header.read_text())
    begin = re.search(r"\bclass Engine\b[^;{]*\{", text)
    if begin is None:
        return None
    found = Engine(set(), set(), set())
    for statement in _declarations(text[begin.end() :]):
        if statement.startswith("friend "):
            found.friends.add(statement.split()[-1])
        elif data := re.search(r"\b(\w+_)\s*(=.*|\{\})?$", statement):
            found.data.add(data[1])
        elif (method := re.search(r"(\w+)\s*\(", statement)) and method[1] not in {"Engine", "operator"}:
            found.methods.add(method[1])
    return found


def _declarations(body: str) -> Iterator[str]:
    """Those of a class, one line each, without what stands in braces within them."""
    depth, statement = 0, ""
    for place, char in enumerate(body):
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return
        if depth == 0 and char != ";":
            statement += "{}" if char == "}" else char
        # A function's body ends without a semicolon, a type's with one.
        if depth == 0 and (char == ";" or (char == "}" and not body[place + 1 :].lstrip().startswith(";"))):
            yield re.sub(r"\b(public|private|protected) ?:", "", " ".join(statement.split())).strip()
            statement = ""
