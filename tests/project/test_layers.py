"""Imports run downward only, the core knows no transport by name, and modules stay small: read from the source."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import HANGS

from aiocomms import lowlevel

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
CORE = ROOT / "aiocomms"
TRANSPORTS = sorted((ROOT / "transports").glob("*/aiocomms_*/"))
EXAMPLES = sorted((ROOT / "examples").glob("transport_*/"))

# The floors are drawn once, in docs/design.md: a room may import from those below it.
FLOORS = re.search(r"(?s)## Rooms.*?```text\n(.*?)```", (ROOT / "docs" / "design.md").read_text())
LAYERS = [set(floor.split(", ")) for floor in reversed(FLOORS[1].splitlines())]
FOR_TRANSPORTS = {"errors", "ops", "transport", "lowlevel", "cuda"}

MODULE_LINES = 600
OF_HOSTS = {"integrations/ray": "ray", "integrations/torch_transport": "torch.distributed._transport"}
"""Folders that cannot be imported without a host, which `make test-hosts` has."""
FUNCTION_LINES = 30
TABLES = {"misfits"}  # functions that are one table, with a line for each case
NAMES = {entry.name for entry in entry_points(group="aiocomms.transports")} | {root.parent.name for root in TRANSPORTS}
WORDS = (NAMES | {"ucx", "nccl", "gloo"}) - {"local", "net"}  # these are words of their own
NATIVE = ROOT / "transports" / "ucx" / "src"
BINDINGS = NATIVE / "bindings"
OF_BOTH_PATHS = {"bindings", "calls", "kept", "tensors", "uncollected", "unlocked"}
"""The bindings that Python code uses, too: the engine's methods, the views of tensors, the kept memory, and guards."""
POLICY_LINES = 1_310
OF_TORCH = {"c10d", "nccl", "gloo"}
"""The names that torch.distributed has too, which its backend speaks of."""


def sources(*roots: Path) -> list[Path]:
    found = sorted(path for root in roots for path in root.rglob("*.py"))
    assert found, f"no Python in {roots}"
    return found


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


Rule = Callable[[Path], Iterable[tuple[int, str]]]


def holds_for(*roots: Path) -> Callable[[Rule], Callable[[], None]]:
    """Make a test of a generator that yields what is wrong in a file: its line, and a text."""

    def test_of(rule: Rule) -> Callable[[], None]:
        def test() -> None:
            wrong = [f"{path.relative_to(ROOT)}:{n}: {what}" for path in sources(*roots) for n, what in rule(path)]
            assert not wrong, "\n".join(wrong)

        return test

    return test_of


def module_name(path: Path) -> str:
    """Name the module of a file: ``aiocomms.ops._p2p``."""
    top = CORE if CORE in path.parents else next(root for root in TRANSPORTS if root in path.parents)
    return ".".join(path.relative_to(top.parent).with_suffix("").parts).removesuffix(".__init__")


TYPES = {"aiocomms.core.core", "aiocomms.communicator.communicator"}
"""The modules that any room may import for type checkers alone, to name the class of a core or a communicator."""


def of_types(path: Path) -> set[ast.AST]:
    """Find the imports of :data:`TYPES` for type checkers."""
    blocks = [
        node for node in parse(path).body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {it for block in blocks for it in block.body if isinstance(it, ast.ImportFrom) and it.module in TYPES}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Find every import, in functions and for type checkers too but of two classes: its line, and what it names."""
    left_out = of_types(path)
    for node in ast.walk(parse(path)):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


MODULES = {module_name(path) for path in sources(CORE)}


def core_imports(path: Path) -> list[tuple[int, str]]:
    """Find the modules of the core that a file imports."""
    found = {(line, name if name in MODULES else name.rpartition(".")[0]) for line, name in imports(path)}
    return sorted((line, name) for line, name in found if name in MODULES and name != "aiocomms")


def room(module: str) -> str:
    """Return the first level below ``aiocomms``: ``ops`` for ``aiocomms.ops._p2p``."""
    return module.split(".")[1]


def layer(module: str) -> int:
    return next(i for i, rooms in enumerate(LAYERS) if room(module) in rooms)


ROOMS = {room(name) for name in MODULES if name != "aiocomms"} - {
    "__main__",
    "pytest_plugin",
}  # any project's pytest loads these


def test_layer_order_names_every_room():
    assert set().union(*LAYERS) == ROOMS


@holds_for(CORE, *TRANSPORTS, *EXAMPLES)
def test_no_import_is_relative(path):
    return {(line, "a relative import") for line, name in imports(path) if name.startswith(".")}


@holds_for(CORE)
def test_imports_run_downward(path):
    if path.parent != CORE or path.stem in ROOMS:
        me = module_name(path)
        yield from ((line, f"imports {name}") for line, name in core_imports(path) if layer(name) > layer(me))


def test_imports_form_no_cycle():
    """Neither by imports within a room, nor within functions, nor for type checkers; in transports, too."""
    modules = {module_name(path): path for path in sources(CORE, *TRANSPORTS)}
    graph: dict[str, set[str]] = {}
    for me, path in modules.items():
        if me not in {"aiocomms", "aiocomms.pytest_plugin"}:  # these load what they name when it is asked for
            named = {name if name in modules else name.rpartition(".")[0] for _, name in imports(path)}
            graph[me] = {name for name in named & modules.keys() if name != me and not me.startswith(f"{name}.")}
    while leaves := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert not graph, "\n".join(f"{name} needs {', '.join(sorted(needs))}" for name, needs in graph.items())


@holds_for(CORE / "endpoints")
def test_endpoints_do_not_know_what_the_wire_is(path):
    """A simulation has another one."""
    return ((line, f"imports {name}") for line, name in imports(path) if name in {"socket", "selectors"})


@holds_for(*TRANSPORTS, *EXAMPLES)
def test_transport_imports_only_the_toolkit_of_the_core(path):
    for line, name in core_imports(path):
        inside = name.startswith("aiocomms.lowlevel.") and name != "aiocomms.lowlevel.clock"
        if room(name) not in FOR_TRANSPORTS or inside:
            yield line, f"imports {name}"


@holds_for(*TRANSPORTS, *EXAMPLES)
def test_transport_imports_no_other_transport(path):
    others = {root.name for root in TRANSPORTS} - set(path.relative_to(ROOT).parts)
    return ((line, f"imports {name}") for line, name in imports(path) if name.split(".")[0] in others)


def test_toolkit_exports_exactly_what_its_docstring_describes():
    described = set(re.findall(r":(?:class|func|data|mod):`(\w+)`", lowlevel.__doc__))
    assert described == set(lowlevel.__all__)
    assert all(getattr(lowlevel, name).__doc__ for name in described - {"LOOPBACK", "MAX_RECORD"})


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Find the strings that stand alone as statements: docstrings, of attributes too."""
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


@holds_for(CORE)
def test_core_names_no_transport(path):
    told, words = docstrings(parse(path)), WORDS - (OF_TORCH if "torch_backend" in path.parts else set())
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in told:
            if node.value in NAMES or any(word in node.value.lower() for word in words):
                yield node.lineno, repr(node.value)
        elif isinstance(node, (ast.Name, ast.Attribute, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.arg)):
            name = str(next(getattr(node, field) for field in ("id", "attr", "name", "arg") if hasattr(node, field)))
            if any(word in name.lower() for word in words):
                yield node.lineno, name
    yield from ((line, f"imports {name}") for line, name in imports(path) if name.startswith("aiocomms_"))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(parse(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


@holds_for(CORE, *TRANSPORTS)
def test_modules_and_functions_stay_below_their_line_limits(path):
    lines = path.read_text().splitlines()
    if len(lines) > MODULE_LINES:
        yield len(lines), f"more than {MODULE_LINES} lines"
    told = {line for node in docstrings(parse(path)) for line in range(node.lineno, node.end_lineno + 1)}
    code = {n for n, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")} - told
    for node in functions(path):
        length = len(code & set(range(node.lineno, node.end_lineno + 1)))
        if length > FUNCTION_LINES and node.name not in TABLES:
            yield node.lineno, f"{node.name} has {length} lines of code"


def test_native_sources_stay_below_the_line_limit():
    sizes = {path: len(path.read_text().splitlines()) for path in NATIVE.rglob("*.[ch]pp")}
    assert len(sizes) >= 80
    assert {path.name: lines for path, lines in sizes.items() if lines > MODULE_LINES} == {}


def test_native_code_that_repeats_python_policy_stays_small():
    """All other bindings exist only because native code starts plain ops, as Python code starts the rest."""
    files = [path for path in BINDINGS.iterdir() if path.stem not in OF_BOTH_PATHS]
    lines = [line.strip() for path in files for line in path.read_text().splitlines()]
    code = [line for line in lines if line and not line.startswith(("//", "#"))]  # Includes repeat nothing.
    assert len(files) >= 10
    assert len(code) <= POLICY_LINES, f"{len(code)} lines in {sorted(path.name for path in files)}"


@holds_for(CORE, *TRANSPORTS)
def test_docstrings_describe_only_existing_parameters(path):
    for node in functions(path):
        described = [text.split(":")[0] for text in (ast.get_docstring(node) or "").split(":param ")[1:]]
        a = node.args
        given = [arg.arg for arg in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if arg is not None]
        if described != [name for name in given if name in described]:
            yield node.lineno, f"{node.name} has {given}, and describes {described}"


@pytest.mark.search
@pytest.mark.real
def test_every_module_can_be_imported_first():
    """A circle of imports shows only when a module of it comes first."""
    absent = {CORE / folder for folder, host in OF_HOSTS.items() if find_spec(host) is None}
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


SHARED_NAMES = {"Batch", "Communicator", "Endpoint"}
"""The names that users type, in a form of records or of programs without a loop, too."""
LIKE_THEIRS = {"Event"}
"""The protocols that are named as what they stand for: ``threading.Event`` and ``torch.cuda.Event``."""


def test_class_names_are_unique():
    """One word means one thing, to whoever searches for it."""
    places: dict[str, list[str]] = {}
    for path in sources(CORE, *TRANSPORTS):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef) and node.name not in SHARED_NAMES | LIKE_THEIRS:
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    wrong = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not wrong, "\n".join(wrong)


def test_engine_class_names_are_unique():
    """The linker takes one of two for both, and what a template makes of it corrupts memory."""
    headers = sorted((ROOT / "transports" / "ucx" / "src").rglob("*.hpp"))
    texts = [header.read_text() for header in headers]
    names = Counter(re.findall(r"^(?:class|struct|enum class) (\w+)[^;(]*\{", "\n".join(texts), re.MULTILINE))
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []
