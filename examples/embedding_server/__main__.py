"""What every rank runs: `torchrun --standalone --nproc-per-node 2 -m embedding_server`."""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial


def main() -> None:
    """Run this rank until the job ends."""
    parser = argparse.ArgumentParser(prog="embedding_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", default=8000, type=int, help="0 picks a free one (default: %(default)s)")
    options = parser.parse_args()
    # Importing torch takes seconds; until the event loop takes these signals over, they just end the rank.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit())

    import anyio

    from .rank import run

    anyio.run(partial(run, options.host, options.port))


if __name__ == "__main__":
    main()
