"""The start of the ranks of ``aiocomms bench``.

If no launcher has started the ranks, this module starts the ranks as tasks or processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from torch.distributed import TCPStore

from aiocomms.bootstrap.launchers import read_environment
from aiocomms.bootstrap.registry import entries
from aiocomms.cli.bench import peers, rank
from aiocomms.cli.bench.arguments import BenchPlan, check_ranks, plan_of

_RANKS = 2
_GRACE = 5.0
"""The time in seconds within which the other ranks must end after one rank has failed."""


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the benchmark.

    :param options: the parsed arguments.
    :param arguments: the command's arguments, which the started processes also get.
    :returns: the exit status.
    :raises ValueError: an option has an invalid value.
    """
    plan = plan_of(options)
    _check_names("--transport", plan.transports, ["auto", *sorted(entries())])
    _check_names("--vs", plan.peers, peers.known())
    launch = read_environment(os.environ)
    if launch is None:
        ranks = options.ranks or _RANKS
        check_ranks(plan, ranks)
        return rank.run(plan, ranks, None) if plan.in_process else asyncio.run(_start(plan, ranks, arguments))
    if options.ranks not in (None, launch.size):
        raise ValueError(f"--ranks is {options.ranks}, wanted {launch.size}, which {launch.launcher} has started")
    if plan.in_process:
        raise ValueError(f"--in-process is given, wanted only where no launcher, here {launch.launcher}, makes ranks")
    check_ranks(plan, launch.size)
    return rank.run(plan, launch.size, launch)


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{option} names {name!r}, wanted some of {', '.join(known)}")


async def _start(plan: BenchPlan, ranks: int, arguments: Sequence[str]) -> int:
    """Start the ranks, with a peer's launcher if the peer needs one.

    Wait until all ranks have ended. If a rank fails, kill the ranks that still run after a grace period.
    """
    command = [sys.executable, "-m", "aiocomms", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    launcher = peers.launcher(plan.peers, ranks)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [{}] if launcher else [_place(rank, ranks, store.port) for rank in range(ranks)]
    processes = [await asyncio.create_subprocess_exec(*launcher, *command, env=env | place) for place in places]
    try:
        async with asyncio.timeout(None) as patience:
            for ended in asyncio.as_completed([process.wait() for process in processes]):
                if await ended != 0:
                    patience.reschedule(asyncio.get_running_loop().time() + _GRACE)
    except TimeoutError:
        pass  # The remaining processes wait for one that is gone.
    finally:
        for number, process in enumerate(processes):
            if process.returncode is None:
                process.kill()
            elif process.returncode < 0:
                print(f"aiocomms bench: process {number} ended by signal {-process.returncode}", file=sys.stderr)
        await asyncio.gather(*(process.wait() for process in processes))
    return int(any(process.returncode for process in processes))


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a rank."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
