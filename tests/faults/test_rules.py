"""Rules of the sources: no code loads pickles unasked, evaluates text, or listens on every interface."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.deterministic

ROOT = Path(__file__).parents[2]
PYTHON = sorted(path for top in ("aiocomms", "transports", "examples") for path in (ROOT / top).rglob("*.py"))
NATIVE = sorted(path for path in (ROOT / "transports").rglob("*.?pp") if "build" not in path.parts)

CALLS = {
    "loads": {"pickle", "pickling", "_pickle", "marshal", "cloudpickle", "dill", "joblib"},
    "load": {"torch", "pickle", "pickling", "marshal", "joblib"},
    "Unpickler": {"pickle", "pickling", "_pickle"},
    "system": {"os"},
    "popen": {"os"},
}
NAMES = {"eval", "exec", "compile", "__import__"}
IMPORTS = {"shelve", "marshal", "xmlrpc", "dill", "cloudpickle", "joblib"}
ASKED_FOR = {("aiocomms/ops/codec.py", "decode", "pickling.loads")}
"""The only call that is permitted: both ends have asked for a pickle."""
WILDCARDS = {"0.0.0.0", "::", "[::]"}
"""The addresses of every interface. The empty host of a bound socket is one, too."""


def forbidden(tree: ast.AST, where: str = "") -> Iterator[tuple[int, str, str]]:
    """Find every forbidden call and constant: its line, the function it is in, and its text."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else where
        yield from ((node.lineno, inside, text) for text in _texts(node))
        yield from forbidden(node, inside)


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in WILDCARDS:
        yield node.value
    elif isinstance(node, (ast.Name, ast.Attribute)) and "INADDR_ANY" in ast.unparse(node):
        yield ast.unparse(node)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        names = {alias.name for alias in node.names}
        modules = names if isinstance(node, ast.Import) else {node.module or ""}
        loads = isinstance(node, ast.ImportFrom) and modules == {"pickle"} and names & {"loads", "load", "Unpickler"}
        if loads or IMPORTS & {module.split(".")[0] for module in modules}:
            yield ast.unparse(node)


def _call(node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in NAMES:
        yield function.id
    if isinstance(function, ast.Attribute):
        owner = ast.unparse(function.value)
        if owner in CALLS.get(function.attr, ()):
            yield ast.unparse(function)
        host = node.args[0].elts[0] if node.args and isinstance(node.args[0], ast.Tuple) and node.args[0].elts else None
        if function.attr in ("bind", "create_server") and isinstance(host, ast.Constant) and host.value in ("", None):
            yield ast.unparse(node)
    if any(keyword.arg == "shell" and ast.unparse(keyword.value) != "False" for keyword in node.keywords):
        yield f"{ast.unparse(function)}(shell=...)"


def test_python_sources_have_no_forbidden_calls_beyond_the_exceptions() -> None:
    found = {
        ((str(path.relative_to(ROOT)), inside, text), line)
        for path in PYTHON
        for line, inside, text in forbidden(ast.parse(path.read_text()))
    }
    wrong = [
        f"{key[0]}:{line}: {key[2]} in {key[1] or 'the module'}" for key, line in sorted(found) if key not in ASKED_FOR
    ]
    assert not wrong, "\n".join(wrong)
    assert {key for key, _ in found} == ASKED_FOR


def test_native_sources_have_no_forbidden_calls() -> None:
    rule = re.compile(r"INADDR_ANY|in6addr_any|0\.0\.0\.0|\bsystem\s*\(|\bpopen\s*\(|\bstrcpy\b|\bsprintf\b")
    texts = {path.relative_to(ROOT): re.sub(r"//.*", "", path.read_text()) for path in NATIVE}
    found = [(name, text, it) for name, text in texts.items() for it in rule.finditer(text)]
    assert texts
    assert not found, "\n".join(
        f"{name}:{text.count(chr(10), 0, it.start()) + 1}: {it[0]!r}" for name, text, it in found
    )


FACTORIES = {
    f"torch.{name}"
    for name in (
        *("empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "asarray", "scalar_tensor"),
        *("arange", "eye", "linspace", "logspace", "rand", "randn", "randint", "randperm"),
    )
}
"""The functions that make a tensor on torch's default device, and in whatever mode is on."""
BUFFERS = "aiocomms/ops/buffers.py"
OWN_PROGRAMS = ("aiocomms/testing/", "aiocomms/cli/bench/")
"""The folders of programs of their own, and of code that makes what a program would."""


def makes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Find every call that makes a tensor: its line, and what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES:
            yield node.lineno, ast.unparse(node.func)


@pytest.mark.fault(115)
def test_buffers_are_allocated_in_one_module() -> None:
    names = {str(path.relative_to(ROOT)): path for path in PYTHON}
    ours = [name for name in names if not name.startswith(("examples/", *OWN_PROGRAMS)) and "/tests/" not in name]
    found = {name: list(makes(ast.parse(names[name].read_text()))) for name in ours}
    assert found.pop(BUFFERS)
    wrong = [f"{name}:{line}: {call}: use {BUFFERS}" for name, calls in found.items() for line, call in calls]
    assert not wrong, "\n".join(wrong)


SNIPPETS = [
    "import pickle\npickle.loads(x)",
    "def f():\n    import pickle as pickling\n    pickling.loads(x)",
    "from pickle import loads",
    "torch.load(f)",
    "torch.load(f, weights_only=True)",
    "eval(x)",
    "s.bind(('0.0.0.0', 1))",
    "s.bind(('', 1))",
    "socket.create_server(('', 0))",
    "socket.create_server(('::', 0))",
    "s.bind((socket.INADDR_ANY, 0))",
    "import dill",
    "subprocess.run(x, shell=True)",
]


def test_forbidden_call_rule_finds_every_snippet() -> None:
    missed = [text for text in SNIPPETS if not list(forbidden(ast.parse(text)))]
    assert not missed, "\n".join(missed)
