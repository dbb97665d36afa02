"""A type checker's view of the methods that are written once and typed twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANGS

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]

PROGRAM = """
import numpy
import torch
import aiocomms
from aiocomms import blocking

Array = numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]

async def check(comm: aiocomms.Communicator, portal: aiocomms.Portal, t: torch.Tensor, a: Array) -> None:
    reveal_type(portal.all_reduce(t, "sum", timeout=3))
    reveal_type(portal.all_reduce(t).wait())
    reveal_type(portal.all_gather_object(1).wait())
    reveal_type(portal.batch().send(t, 1).issue().wait())
    reveal_type(portal.all_reduce(a).wait())
    reveal_type(portal.new_window(t).fetch_add(0, 0, 1).wait())
    reveal_type(blocking.new_comm("local", timeout=3).split([0]))
    portal.all_reduce(t, rank=3)
    portal.send(t)
    reveal_type(await comm.all_reduce(a))
    reveal_type(await comm.all_gather([a], t))
    reveal_type(await aiocomms.functional.all_reduce(t))
    comm.all_reduce(3)
    blocking.new_comm(transports="local")
"""

ARRAY = "numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]]"
WORK = "aiocomms.communicator.portal.works.BlockingWork[torch._tensor.Tensor]"
REVEALED = [
    WORK, "torch._tensor.Tensor", "list[Any]", "list[Any]", ARRAY, "int",
    "aiocomms.blocking.communicator.Communicator | None", ARRAY, f"list[{ARRAY}]", "torch._tensor.Tensor",
]  # fmt: skip


WRONG = [
    "Unexpected keyword argument", "Too few arguments  [call-arg]", "Value of type variable",
    "Unexpected keyword argument",
]  # fmt: skip


@pytest.mark.real
def test_mypy_infers_signatures_and_results_of_portal_methods(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--python-version=3.11"]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache")]
    run = subprocess.run(
        [*command, *cache, str(tmp_path / "program.py")], cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
        check=False,
    )  # fmt: skip
    found = re.findall(r'Revealed type is "(.*)"', run.stdout)
    assert [kind.replace("builtins.", "") for kind in found] == REVEALED, run.stdout
    errors = [line.partition("error: ")[2] for line in run.stdout.splitlines() if "error: " in line]
    assert [error.partition('"')[0].strip() for error in errors] == WRONG, run.stdout
