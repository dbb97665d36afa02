"""The arguments of ``aiocomms bench``, and the plan of measurements that they describe."""

from __future__ import annotations

import argparse
import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from aiocomms.cli.bench.operations import ITEM, OPERATIONS

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""The number of bytes for each suffix of a size, as in nccl-tests."""
_LARGEST = 1 << 36
_MOST = 100_000
"""The largest number of iterations. The number is limited, because each rank gathers the times of all ranks."""


class BenchPlan(NamedTuple):
    """The plan of all measurements. Every rank has the same plan."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    transports: tuple[str, ...]
    peers: tuple[str, ...]
    iterations: int
    warmup: int
    check: int
    seconds: float
    bind: bool
    neighbours: int
    in_process: bool
    json: bool
    plot: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``aiocomms bench`` to the parser. Several long options have their names from nccl-tests."""
    add = parser.add_argument
    add("op", nargs="*", help=f"which, all_reduce by default: {', '.join(OPERATIONS)}")
    add("-b", "--minbytes", type=_size, default=8, metavar="SIZE", help="the smallest size: 8 (default), 4K, 1M, 1G")
    add("-e", "--maxbytes", type=_size, default=2 << 20, metavar="SIZE", help="the largest size (2M)")
    add("-f", "--stepfactor", type=int, default=8, metavar="N", help="each size is this many times the last (8)")
    add("-i", "--iters", type=int, default=500, metavar="N", help="timed iterations of each row (500)")
    add("-w", "--warmup", type=int, default=20, metavar="N", help="iterations before those (20)")
    add("-c", "--check", type=int, default=1, metavar="N", help="iterations checked before, and after; 0: none (1)")
    add("-s", "--seconds", type=float, default=math.inf, metavar="S", help="at most so long per row and library")
    add("-n", "--ranks", type=int, metavar="N", help="processes to start here (2), outside torchrun, mpiexec and srun")
    add("--bind", action="store_true", help="each rank to a processor of its own, where there are as many")
    add("--neighbours", type=int, default=0, metavar="N", help="processes beside the ranks that want a processor (0)")
    add("--in-process", action="store_true", help="the ranks are tasks of one process; for transports that can")
    add("--transport", type=_names, default=("auto",), metavar="NAMES", help="some, one after the other (auto)")
    add("--vs", type=_names, default=(), metavar="NAMES", help="libraries to measure in turn with ours; see the docs")
    add("--json", action="store_true", help="print one JSON document, in place of the table")
    add("--plot", type=Path, metavar="FILE", help="draw time and bus bandwidth over the size; needs aiocomms[bench]")


def plan_of(options: argparse.Namespace) -> BenchPlan:
    """Check the options, and return the plan.

    :raises ValueError: an option has an invalid value.
    """
    _check_numbers(options)
    for op in options.op:
        if op not in OPERATIONS:
            raise ValueError(f"op is {op!r}, wanted some of {', '.join(OPERATIONS)}")
    for name, given in (("--vs", options.vs), ("--bind", options.bind)):
        if options.in_process and given:
            raise ValueError(f"{name} is given with --in-process, wanted one of them: it is about processes")
    if options.plot is not None:
        _check_plot(options.plot)
    sizes = [options.minbytes]
    while sizes[-1] * options.stepfactor <= options.maxbytes:
        sizes.append(sizes[-1] * options.stepfactor)
    return BenchPlan(
        tuple(dict.fromkeys(options.op)) or ("all_reduce",), tuple(sizes), options.transport, options.vs,
        options.iters, options.warmup, options.check, options.seconds, options.bind, options.neighbours,
        options.in_process, options.json, options.plot,
    )  # fmt: skip


def check_ranks(plan: BenchPlan, ranks: int) -> None:
    """Check that all operations support the number of ranks.

    :raises ValueError: an operation needs another number of ranks.
    """
    for op in plan.ops:
        if OPERATIONS[op].pair and ranks != 2:
            raise ValueError(f"--ranks is {ranks} and op is {op!r}, wanted 2 ranks: it is between two")


def _check_numbers(options: argparse.Namespace) -> None:
    for name, value, least, most in (
        ("--maxbytes", options.maxbytes, options.minbytes, _LARGEST),
        ("--stepfactor", options.stepfactor, 2, _LARGEST),
        ("--iters", options.iters, 10, _MOST),
        ("--warmup", options.warmup, 0, _MOST),
        ("--check", options.check, 0, _MOST),
        ("--seconds", options.seconds, 0.001, math.inf),
        ("--neighbours", options.neighbours, 0, 1024),
        ("--ranks", options.ranks if options.ranks is not None else 2, 1, 1024),
    ):
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}, wanted {least} to {most}")


def _check_plot(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot is {path}, wanted a file in a folder that there is")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'aiocomms[bench]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ValueError(f"--plot is {path}, wanted a name that ends in one of {', '.join(sorted(formats))}")


def _size(text: str) -> int:
    """Parse a size that is written as in nccl-tests, such as ``4K``. Return the size in bytes."""
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"is {text!r}, wanted bytes such as 8, 4K, 1M or 1G")
    value = int(match[1]) * UNITS[match[2]]
    if not ITEM <= value <= _LARGEST:
        raise argparse.ArgumentTypeError(f"is {text!r}, wanted {ITEM} bytes to 2^{math.log2(_LARGEST):.0f}")
    return value


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"is {text!r}, wanted names with commas between")
    return names
