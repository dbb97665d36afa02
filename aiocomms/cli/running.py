"""The command ``aiocomms run``, which starts a program's ranks, and replaces a process that dies."""

from __future__ import annotations

import argparse

import anyio

from aiocomms.launching import Job, supervise


def run(options: argparse.Namespace) -> int:
    """Run the job, and return its exit code.

    :raises CommError: an option is wrong, or the ranks cannot be started.
    """
    given = {name: value for name, value in vars(options).items() if name in Job.__struct_fields__}
    given["program"] = options.program if options.module is None else ["-m", *options.module]
    return anyio.run(supervise, Job(**given))
