"""The command ``aiocomms simulate``, which runs a function of a file on simulated ranks, with one seed or many."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import shlex
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aiocomms.testing.simulation import Faults
from aiocomms.testing.simulation.faults import kept
from aiocomms.testing.simulation.searching import FailedHistory, attempt, read_seed, read_seeds, search
from aiocomms.testing.simulation.trial import Program, SimulatedTrial

KINDS = ("deaths", "pauses", "slow", "cuts", "partitions", "stores")


def run(options: argparse.Namespace) -> int:
    """Run one simulation (a *history*) for each seed, and print the result.

    :returns: the exit status: 1 if a history has failed.
    :raises ValueError: the function does not exist, or an option has a wrong value.
    """
    faults = Faults(restarts=options.restarts, **{kind: getattr(options, kind) for kind in KINDS})
    trial = SimulatedTrial(_program(options.program), options.ranks, faults)
    if options.seed is None:
        count, failure = search(trial, read_seeds(options.seeds))
    else:
        number, chosen = read_seed(options.seed)
        failure = attempt(trial, number, chosen)
        count = int(failure is None)
    print(f"{count} {'history' if count == 1 else 'histories'} of {options.ranks} ranks without an error")
    if failure is None:
        return 0
    _report(failure, options)
    if options.trace is not None:
        _write(trial, failure, options.trace)
    return 1


def _program(text: str) -> Program:
    """Return the function ``FUNCTION`` of the file ``FILE.py``.

    :raises ValueError: the function does not exist, or is not an async function.
    """
    name, _, function = text.rpartition(":")
    path = Path(name)
    if not (name.endswith(".py") and path.is_file()):
        raise ValueError(f"FILE.py:FUNCTION is {text!r}, wanted a file of Python, a colon, and a function's name")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # Pickles refer to classes by this name.
    spec.loader.exec_module(module)
    names = vars(module)
    found: Any = names.get(function)
    if not inspect.iscoroutinefunction(found):
        there = [key for key, value in names.items() if inspect.iscoroutinefunction(value)]
        raise ValueError(f"FUNCTION is {function!r}, wanted an async function of {name}: {', '.join(there) or 'none'}")
    program: Program = found
    return program


def _report(failure: FailedHistory, options: argparse.Namespace) -> None:
    """Print the error with only the program's stack frames. Then print the command that repeats the history."""
    error = failure.error
    ours = os.sep + "aiocomms" + os.sep
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if ours not in frame.filename]
    print(f"the history of seed {failure.seed!r} has failed:")
    print("".join(traceback.format_list(lines)) + "".join(traceback.format_exception_only(error)), end="")
    print(f"repeat it: {shlex.join(_command(failure.seed, options))}")


def _command(seed: str, options: argparse.Namespace) -> Iterable[str]:
    yield from ("aiocomms", "simulate", options.program, "--ranks", str(options.ranks), "--seed", seed)
    for kind in KINDS:
        if getattr(options, kind):
            yield from (f"--{kind}", str(getattr(options, kind)))
    if options.restarts:
        yield "--restarts"


def _write(trial: SimulatedTrial, failure: FailedHistory, folder: Path) -> None:
    """Run the history again, and write the flight recorders of its ranks."""
    number, chosen = read_seed(failure.seed)
    plan = kept(trial.plan(number), chosen) if failure.plan else []
    try:
        trial.run(number, plan, failure.seed, trace=folder)
    except type(failure.error):
        print(f"{folder}: the trace of the history; read it by: aiocomms trace {shlex.quote(str(folder))}")
