"""The embedding server under its supervisor, each rank in a session of its own, as torchrun has its workers.

Linux shares out the processors among sessions before it does so among their threads (``sched_autogroup``). Were all
ranks of one server in one session, and each of the other's in its own, the latter would have twice the share.
"""

from __future__ import annotations

import os
from typing import Any

from embedding_server import supervisor

start = supervisor.run_rank


def run_rank(*args: Any) -> None:
    """Be a rank."""
    os.setsid()
    start(*args)


if __name__ == "__main__":
    from benchmarks.serve import supervised

    supervisor.run_rank = supervised.run_rank
    supervisor.main()
