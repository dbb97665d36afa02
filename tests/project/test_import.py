"""Importing aiocomms is cheap, and its lazily loaded names are what they seem."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import HANGS

import aiocomms

pytestmark = pytest.mark.deterministic


def python(*args: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stderr
    return done


def import_time(module: str) -> int:
    """Measure the import of a module with all that it imports, in microseconds, as ``-X importtime`` says."""
    rows = python("-X", "importtime", "-c", f"import {module}").stderr.splitlines()
    return next(int(row.split("|")[1]) for row in rows if row.split("|")[-1].strip() == module)


def type_checkers_see() -> dict[str, str]:
    """Read which names ``aiocomms/__init__.py`` imports for type checkers, and what each stands for."""
    tree = ast.parse(Path(aiocomms.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


NEEDED = "aiocomms.communicator.opening"
"""The only module of communicators that ``import aiocomms`` loads, so that ``new_comm`` needs no import on the loop."""
ALONE, LIGHT, OPENING, LAZY = STEPS = [
    "import aiocomms",
    "import aiocomms.errors, aiocomms.bootstrap.launchers",
    "aiocomms.new_comm, aiocomms.open_endpoint, aiocomms.from_process_group, aiocomms.COMM_TIMEOUT",
    "aiocomms.new_comm, aiocomms.functional, aiocomms.testing",
]
NO_RAY, OLD_TORCH = REFUSED = [
    "sys.modules['ray'] = None; import aiocomms.integrations.ray",
    "sys.modules['torch.distributed._transport'] = None; import aiocomms.integrations.torch_transport",
]
SCRIPT = f"""
import sys
said = {{}}
for step in {STEPS}:
    exec(step)
    said[step] = list(sys.modules)
for step in {REFUSED}:
    try:
        exec(step)
    except ImportError as error:
        said[step] = f"{{type(error).__name__}}: {{error}}"
import json
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """Take all steps in one interpreter; return the modules loaded after each, or its error."""
    return json.loads(python("-c", SCRIPT).stdout)


@pytest.mark.real
def test_import_is_quicker_than_asyncio():
    """Quicker than asyncio, which whoever uses it imports anyway."""
    ours, theirs = zip(*[(import_time("aiocomms"), import_time("asyncio")) for _ in range(3)], strict=True)
    assert min(ours) < min(theirs)


def test_import_loads_no_heavy_module_or_transport(said):
    """Check for our modules, for heavy ones, and for transports."""
    heavy = {"torch", "asyncio", "anyio", "trio"}
    assert set(said[ALONE]) & (heavy | {"numpy", "msgspec", "uvloop", "pytest"}) == set()
    assert {name for name in said[ALONE] if name.startswith("aiocomms.communicator.")} == {NEEDED}
    assert set(said[LIGHT]) & heavy == set()
    assert set(said[OPENING]) & heavy == set()  # a loop may run, which this would hold
    assert [name for name in said[LAZY] if name.startswith("aiocomms_")] == []


def test_import_without_ray_says_what_to_install(said):
    assert "aiocomms.integrations.ray needs Ray 2.60 or later, pip install 'aiocomms[ray]'" in said[NO_RAY]


def test_import_on_torch_without_one_sided_transports_suggests_endpoints(said):
    """The backend is of no use for other imports: torch alone asks for it, by its entry point."""
    assert said[OLD_TORCH].startswith("ImportError: torch")
    assert "which came with 2.15: use aiocomms.blocking.open_endpoint" in said[OLD_TORCH]


def test_names_for_type_checkers_match_the_runtime():
    seen = type_checkers_see()
    assert set(seen) == set(aiocomms.__all__) == {*aiocomms._HOME, *aiocomms._MODULES}
    for name, origin in seen.items():
        module, attribute = origin.split(":")
        value = getattr(aiocomms, name)
        if name in aiocomms._MODULES:
            assert value is importlib.import_module(f"aiocomms.{name}")
        else:
            assert value is getattr(importlib.import_module(module), attribute)
            assert aiocomms._HOME[name] == module.removeprefix("aiocomms.") + (f":{attribute}" * (attribute != name))


def test_dir_lists_exactly_the_public_names():
    assert sorted(aiocomms.__all__) == sorted(set(aiocomms.__all__))
    assert sorted(dir(aiocomms)) == sorted([*aiocomms.__all__, "__version__"])


def test_star_import_gives_all_public_names():
    namespace: dict[str, object] = {}
    exec("from aiocomms import *", namespace)
    assert set(aiocomms.__all__) <= set(namespace)


def test_unknown_attribute_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'aiocomms' has no attribute 'all_reduce'"):
        aiocomms.all_reduce  # noqa: B018
    with pytest.raises(ImportError):
        from aiocomms import all_reduce  # noqa: F401


def test_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert aiocomms.__version__ == version("aiocomms")


def test_every_public_class_and_function_has_a_docstring():
    wrong = []
    for name in set(aiocomms.__all__) - aiocomms._MODULES:
        value = getattr(aiocomms, name)
        members = [m for m, v in vars(value).items() if m[0] != "_" and (callable(v) or isinstance(v, property))]
        bases = {m: [getattr(getattr(cls, m, None), "__doc__", None) for cls in value.__mro__] for m in members}
        wrong += [name] * (not value.__doc__) + [f"{name}.{member}" for member, told in bases.items() if not any(told)]
    assert not wrong, "no docstring: " + ", ".join(sorted(wrong))
