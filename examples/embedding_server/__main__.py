"""What every rank runs: `torchrun --standalone --nproc-per-node 2 -m embedding_server`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from functools import partial

DIVISORS = (1, 2, 3, 4, 6, 12)  # of the model's 12 heads


def main() -> None:
    """Run this rank until the job ends."""
    parser = make_parser("embedding_server", __doc__)
    add_shape(parser)
    options = parser.parse_args()
    end_at_once_on_signals()

    import anyio

    from .rank import Shape, run

    shape = Shape(options.tp, options.threads, options.torch_threads)
    anyio.run(run, partial(listen, options.host, options.port), shape)


def make_parser(program: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser of what all command lines of a server have in common."""
    parser = argparse.ArgumentParser(prog=program, description=about)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", default=8000, type=int, help="0 picks a free one (default: %(default)s)")
    return parser


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add how the model is split, and what computes."""
    parser.add_argument(
        "--tp", default=1, type=int, choices=DIVISORS, help="over how many ranks each layer is split (default: 1)"
    )
    parser.add_argument("--threads", default=1, type=positive, help="a rank's threads that compute (default: 1)")
    parser.add_argument(
        "--torch-threads", default=0, type=positive, help="threads of each operation of torch (default: a rank's cores)"
    )


def positive(text: str) -> int:
    """A number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"it is {number}, wanted at least 1")
    return number


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
