"""What every rank runs: `torchrun --standalone --nproc-per-node 2 -m embedding_server`."""

from __future__ import annotations

import argparse
import os
import signal


def main() -> None:
    """Run this rank until the job ends."""
    parser = argparse.ArgumentParser(prog="embedding_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", default=8000, type=int, help="0 picks a free one (default: %(default)s)")
    options = parser.parse_args()
    # The imports take seconds. Until the event loop takes these signals over there is nothing to tidy up, and an
    # exception in the middle of an import would not always get through.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))

    import anyio

    from .rank import run

    anyio.run(run, options.host, options.port)


if __name__ == "__main__":
    main()
