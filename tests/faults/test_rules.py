"""What no code of ours does: load pickles unasked, evaluate text, listen on every interface. Read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
"""Where both ends have asked for it."""
WILDCARDS = {"0.0.0.0", "::", "[::]"}
"""Addresses of every interface; and the empty host, which is one too where a socket is bound."""


def forbidden(tree: ast.AST, where: str = "") -> Iterator[tuple[str, str]]:
    """Every call and constant that is not to be, and the function it is in."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else where
        if isinstance(node, ast.Call):
            yield from ((inside, text) for text in _call(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in WILDCARDS:
            yield inside, node.value
        elif isinstance(node, (ast.Name, ast.Attribute)) and "INADDR_ANY" in ast.unparse(node):
            yield inside, ast.unparse(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            if IMPORTS & {module.split(".")[0] for module in modules}:
                yield inside, ast.unparse(node)
            if (
                isinstance(node, ast.ImportFrom)
                and modules[0] == "pickle"
                and {"loads", "load", "Unpickler"} & {*names}
            ):
                yield inside, ast.unparse(node)
        yield from forbidden(node, inside)


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


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_python(path: Path) -> None:
    found = {(str(path.relative_to(ROOT)), *it) for it in forbidden(ast.parse(path.read_text()))}
    assert found <= ASKED_FOR


def test_the_one_place_is_there() -> None:
    found = {
        ("aiocomms/ops/codec.py", *it) for it in forbidden(ast.parse((ROOT / "aiocomms/ops/codec.py").read_text()))
    }
    assert found == ASKED_FOR


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: str(path.relative_to(ROOT)))
def test_native(path: Path) -> None:
    text = re.sub(r"//.*", "", path.read_text())
    assert not re.findall(r"INADDR_ANY|in6addr_any|0\.0\.0\.0|\bsystem\s*\(|\bpopen\s*\(|\bstrcpy\b|\bsprintf\b", text)


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_the_rule_finds_what_it_is_for(text: str) -> None:
    assert list(forbidden(ast.parse(text)))
