"""The command ``aiocomms run``, which starts a program's ranks, and can replace a dead process."""

from __future__ import annotations

import argparse

import anyio

from aiocomms.launching import Job, supervise


def run(options: argparse.Namespace) -> int:
    """Run the job, and return its exit code.

    :raises CommError: an option has a wrong value, or the ranks cannot be started.
    """
    given = {name: value for name, value in vars(options).items() if name in Job.__struct_fields__}
    # argparse keeps a "--" before the program.
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    given["program"] = program if options.module is None else ["-m", *options.module]
    return anyio.run(supervise, Job(**given))
