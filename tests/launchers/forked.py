"""Start the job by plain multiprocessing: ``forked.py METHOD RANKS PORT FOLDER DEED``."""

from __future__ import annotations

import multiprocessing
import os
import sys

import launched


def rank(number: int, size: int, port: str, folder: str, deed: str) -> None:
    os.environ.update(RANK=f"{number}", WORLD_SIZE=f"{size}", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    launched.run(folder, deed)


def main(method: str, size: int, port: str, folder: str, deed: str) -> int:
    context = multiprocessing.get_context(method)
    ranks = [context.Process(target=rank, args=(number, size, port, folder, deed)) for number in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    method, ranks, port, folder, deed = sys.argv[1:]
    sys.exit(main(method, int(ranks), port, folder, deed))
