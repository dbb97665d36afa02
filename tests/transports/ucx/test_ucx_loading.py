"""UCX changes libc's functions where it has something to register memory with, and nowhere else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from aiocomms_ucx import loading

pytestmark = pytest.mark.deterministic

MODE = "UCX_MEM_MMAP_HOOK_MODE"
WHEEL = ("libuct_cma", "libuct_cuda", "libucm_cuda", "libucx_perftest_cuda")


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MODE, "UCX_MODULE_DIR", "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"):
        monkeypatch.delenv(name, raising=False)


class Wheel:
    """A wheel of UCX, and how it is loaded."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.modules = folder / "libucx" / "lib" / "ucx"
        self.modules.mkdir(parents=True)
        (folder / "libucx" / "__init__.py").touch()
        (self.modules.parent / "libucp.so").touch()
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "libucx")

    def mode(self, *modules: str, driver: bool = False) -> str | None:
        """The mode in which UCX is loaded that has these modules; None: the one that it chooses."""
        for name in modules:
            (self.modules / f"{name}.so").touch()
            (self.modules / f"{name}.so.0.0.0").touch()
        seen: list[str | None] = []
        self.patch.setattr(loading, "_has_driver", lambda: driver)
        self.patch.setattr(loading.libucx, "load_library", lambda: seen.append(os.environ.get(MODE)))
        loading.load_ucx()
        return seen.pop()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    return Wheel(tmp_path, monkeypatch)


def test_memory_hooks_are_off_without_a_gpu(wheel: Wheel) -> None:
    assert wheel.mode(*WHEEL) == "none"
    assert MODE not in os.environ


def test_memory_hooks_are_on_with_a_gpu(wheel: Wheel) -> None:
    assert wheel.mode(*WHEEL, driver=True) is None


def test_memory_hooks_are_off_without_cuda_modules(wheel: Wheel) -> None:
    assert wheel.mode("libuct_cma", driver=True) == "none"


@pytest.mark.parametrize("module", ["libuct_ib", "libuct_xpmem", "libuct_rocm"])
def test_memory_hooks_are_on_with_another_device(wheel: Wheel, module: str) -> None:
    assert wheel.mode(*WHEEL, module) is None


@pytest.mark.parametrize("variable", ["UCX_MODULE_DIR", "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"])
def test_memory_hooks_are_untouched_with_another_ucx(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "true")
    assert wheel.mode(*WHEEL) is None


def test_memory_hook_setting_of_the_user_is_kept(wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "reloc")
    assert wheel.mode(*WHEEL) == "reloc"
    assert os.environ[MODE] == "reloc"
