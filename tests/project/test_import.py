"""Importing aiocomms is cheap, and its lazily loaded names are what they seem."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANGS

import aiocomms


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=HANGS, check=True)


def import_time(module: str) -> int:
    """Microseconds that it takes to import a module with all that it imports, as ``-X importtime`` says."""
    rows = python("-X", "importtime", "-c", f"import {module}").stderr.splitlines()
    return next(int(row.split("|")[1]) for row in rows if row.split("|")[-1].strip() == module)


def type_checkers_see() -> dict[str, str]:
    """The names that ``aiocomms/__init__.py`` imports for type checkers: the module and name each stands for."""
    tree = ast.parse(Path(aiocomms.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.processes
def test_it_is_quick():
    """Quicker than asyncio, which whoever uses it imports anyway."""
    ours, theirs = zip(*[(import_time("aiocomms"), import_time("asyncio")) for _ in range(5)], strict=True)
    assert min(ours) < min(theirs)


@pytest.mark.processes
def test_it_loads_nothing_heavy():
    loaded = set(python("-c", "import aiocomms, sys; print(*sys.modules)").stdout.split())
    assert not loaded & {"torch", "numpy", "msgspec", "asyncio", "anyio", "trio", "uvloop", "pytest"}
    assert {name for name in loaded if name.startswith("aiocomms")} == {"aiocomms"}


@pytest.mark.processes
def test_a_transport_is_loaded_when_it_is_used_and_not_before():
    code = "import aiocomms, sys; aiocomms.new_comm, aiocomms.functional, aiocomms.testing; print(*sys.modules)"
    assert not any(name.startswith("aiocomms_") for name in python("-c", code).stdout.split())


@pytest.mark.processes
@pytest.mark.parametrize("name", ["errors", "bootstrap.launchers"])
def test_a_light_module_stays_light(name):
    loaded = python("-c", f"import aiocomms.{name}, sys; print(*sys.modules)").stdout.split()
    assert not {"torch", "asyncio", "anyio", "trio"} & set(loaded)


def test_what_type_checkers_see_is_what_there_is():
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


def test_nothing_else_is_offered():
    assert sorted(aiocomms.__all__) == sorted(set(aiocomms.__all__))
    assert sorted(dir(aiocomms)) == sorted([*aiocomms.__all__, "__version__"])


def test_a_star_import_works():
    namespace: dict[str, object] = {}
    exec("from aiocomms import *", namespace)
    assert set(aiocomms.__all__) <= set(namespace)


def test_a_name_that_there_is_not():
    with pytest.raises(AttributeError, match="module 'aiocomms' has no attribute 'all_reduce'"):
        aiocomms.all_reduce  # noqa: B018
    with pytest.raises(ImportError):
        from aiocomms import all_reduce  # noqa: F401


def test_the_version_is_the_distributions():
    from importlib.metadata import version

    assert aiocomms.__version__ == version("aiocomms")


@pytest.mark.parametrize("name", [name for name in aiocomms.__all__ if name not in aiocomms._MODULES])
def test_a_public_class_or_function_is_described(name):
    value = getattr(aiocomms, name)
    assert value.__doc__
    members = {
        m: v for m, v in vars(value).items() if not m.startswith("_") and (callable(v) or isinstance(v, property))
    }
    for member in members:
        inherited = [getattr(getattr(cls, member, None), "__doc__", None) for cls in value.__mro__]
        assert any(inherited), f"{name}.{member} has no docstring"


@pytest.mark.processes
def test_without_ray_it_says_what_to_install():
    with pytest.raises(subprocess.CalledProcessError) as error:
        python("-c", "import sys; sys.modules['ray'] = None; import aiocomms.ray")
    assert "aiocomms.ray needs Ray 2.60 or later, pip install 'aiocomms[ray]'" in error.value.stderr


@pytest.mark.processes
def test_what_a_torch_without_one_sided_transports_is_told():
    """It is of no use for anything else that is imported: torch alone asks for it, by its entry point."""
    code = "import sys; sys.modules['torch.distributed._transport'] = None; import aiocomms.torch_transport"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        python("-c", code)
    assert "ImportError: torch" in caught.value.stderr
    assert "which came with 2.15: use aiocomms.blocking.open_endpoint" in caught.value.stderr
