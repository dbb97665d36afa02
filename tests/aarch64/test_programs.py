"""The test programs of the UCX transport's engine, compiled for aarch64 as a release is, and run by qemu-user.

They show that the engine compiles without a warning, and that its layouts, alignments, atomic instructions, system
calls and results are right. They cannot show in which order another core sees stores, because qemu's cores are those
of this machine. `transports/ucx/litmus` tests this order.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from look import COMPILER, EMULATOR
from programs import PROGRAMS, UCX, build, run_program

pytestmark = pytest.mark.real

LIBUCX = Path(os.environ["AIOCOMMS_AARCH64"]) / "libucx"
"""UCX's wheel for aarch64; the Makefile fetches it."""
SYSTEM = "/usr/aarch64-linux-gnu"
EMULATED = UCX / "tests" / "emulated.cpp"
MACHINES = [("cortex-a57", "4096"), ("max", "65536")]
"""Processors without and with the atomic instructions of ARMv8.1, between which GCC's helpers choose at run time; and
bytes of a page of memory, which kernels differ in."""


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build one of the programs, and return its folder."""
    where = tmp_path_factory.mktemp(request.param)
    # GCC 12 sees overlaps where its own library joins strings (its bug 105651).
    build(where, [COMPILER, "-O3", "-Wno-restrict"], PROGRAMS[request.param], LIBUCX, EMULATED)
    return where


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
@pytest.mark.parametrize(("processor", "page"), MACHINES)
def test_of_the_engine(program: Path, processor: str, page: str) -> None:
    run_program(EMULATOR, "-cpu", processor, "-p", page, "-L", SYSTEM, "./program", where=program)
