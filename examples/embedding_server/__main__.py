"""What every rank runs: `torchrun --standalone --nproc-per-node 2 -m embedding_server`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from functools import partial


def main() -> None:
    """Run this rank until the job ends."""
    parser = make_parser("embedding_server", __doc__)
    options = parser.parse_args()
    end_at_once_on_signals()

    import anyio

    from .rank import run

    anyio.run(run, partial(listen, options.host, options.port))


def make_parser(program: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser of what all command lines have in common."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", default=8000, type=int, help="0 picks a free one (default: %(default)s)")
    return parser


def end_at_once_on_signals() -> None:
    """End on Ctrl-C and SIGTERM until the event loop takes them over: there is nothing to tidy up before that.

    The imports take seconds, and an exception in the middle of one would not always get through.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise SystemExit(f"cannot listen on {host} port {port}: {error}") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; without it each answer takes 40 ms
    return listener


if __name__ == "__main__":
    main()
