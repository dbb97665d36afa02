"""The program of every rank: `aiocomms run -n 7 --listen 127.0.0.1:8000 -m text_generator --tp 2 --pp 1`.

Rank 0 is the front. The next `tp * pp` ranks are the prefill group. Each decode group has as many ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import anyio
from embedding_server.web import serve

from . import worker
from .links import LOST
from .model import Part, read_shape
from .server import create_app
from .train import KEPT

PAGES = 512  # the pages of each decode group


def main() -> None:
    """Run this rank until the job ends."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # before it serves, it can exit at once
    if os.environ.get("RANK", "0") == "0":
        print(f"the front is process {os.getpid()}", flush=True)
        app = create_app(options)
        serve(app, app.state.drain, options.host, options.port)
        return
    failure: BaseException | None = None
    try:
        anyio.run(worker.run, options)
    except* LOST as errors:
        failure = errors
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if failure is not None:
        sys.exit(f"{type(failure).__name__}: {failure}")


def parse() -> worker.Options:
    """Return the options of the command line, checked against the launcher's number of ranks."""
    parser = argparse.ArgumentParser(prog="text_generator", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="where no launcher opens the socket (default: %(default)s)")
    parser.add_argument("--port", default=8000, type=int, help="the same; 0 picks a free one (default: %(default)s)")
    parser.add_argument("--tp", default=2, type=int, help="shards of a stage (default: %(default)s)")
    parser.add_argument("--pp", default=1, type=int, help="stages (default: %(default)s)")
    parser.add_argument("--pages", default=PAGES, type=int, help="of 16 tokens, of each decoder (default: %(default)s)")
    parser.add_argument("--model", default=KEPT, type=Path, help="a file (default: what was trained on these pages)")
    given = parser.parse_args()
    for name, least in (("tp", 1), ("pp", 1), ("pages", 2)):
        if getattr(given, name) < least:
            parser.error(f"--{name} is {getattr(given, name)}, wanted at least {least}")
    size, ranks = given.tp * given.pp, int(os.environ.get("WORLD_SIZE", 1))
    groups, rest = divmod(ranks - 1, size)
    if rest or groups < 2:
        parser.error(f"there are {ranks} ranks, wanted a front and two or more groups of {size} ranks")
    try:
        Part(0, given.pp, 0, given.tp).check(read_shape(given.model))
    except (OSError, ValueError) as error:
        parser.error(f"{error}; python -m text_generator.train makes a model")
    return worker.Options(**vars(given), decoders=groups - 1)


if __name__ == "__main__":
    main()
