"""Starts the job by plain multiprocessing: ``forked.py METHOD RANKS FOLDER DEED``."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys

import launched


def rank(number: int, size: int, port: int, folder: str, deed: str) -> None:
    os.environ.update(RANK=f"{number}", WORLD_SIZE=f"{size}", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
    launched.run(folder, deed)


def main(method: str, size: int, folder: str, deed: str) -> int:
    context = multiprocessing.get_context(method)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [context.Process(target=rank, args=(number, size, port, folder, deed)) for number in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    method, ranks, folder, deed = sys.argv[1:]
    sys.exit(main(method, int(ranks), folder, deed))
