"""The program of every rank: `aiocomms run -n 2 --listen 127.0.0.1:8000 -m embedding_server`, or another launcher."""

from __future__ import annotations

import argparse
import os

from .rank import EmbeddingServer, Shape
from .server import create_app
from .web import serve

DIVISORS = (1, 2, 3, 4, 6, 12)  # the divisors of the model's 12 heads


def main() -> None:
    """Run this rank until the job ends."""
    parser = argparse.ArgumentParser(prog="embedding_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="where no launcher opens the socket (default: %(default)s)")
    parser.add_argument("--port", default=8000, type=int, help="the same; 0 picks a free one (default: %(default)s)")
    parser.add_argument(
        "--tp", default=1, type=int, choices=DIVISORS, help="over how many ranks each layer is split (default: 1)"
    )
    parser.add_argument("--threads", default=1, type=positive, help="a rank's threads that compute (default: 1)")
    parser.add_argument(
        "--torch-threads", default=0, type=positive, help="threads of each operation of torch (default: a rank's cores)"
    )
    options = parser.parse_args()
    if (size := int(os.environ.get("WORLD_SIZE", 1))) % options.tp:
        parser.error(f"--tp is {options.tp}, wanted a divisor of the number of ranks, which is {size}")
    print(f"rank {os.environ.get('RANK', 0)} is process {os.getpid()}", flush=True)
    server = EmbeddingServer(Shape(options.tp, options.threads, options.torch_threads))
    server.main(lambda: serve(create_app(server), server.drain, options.host, options.port))


def positive(text: str) -> int:
    """Return a number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"the number is {number}, wanted at least 1")
    return number


if __name__ == "__main__":
    main()
