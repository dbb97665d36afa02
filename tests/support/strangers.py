"""Example transports as their users have them: installed in a folder, and used by processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from processes import SUITE_HANGS

QUICK = ["-q", "--assert=plain", "-pno:cacheprovider", "-pno:hypothesispytest", "--deadline=100"]
"""Options of pytest for a run of the conformance suite, of which a check may take as long as in ours."""

DEATH = """
import asyncio, os, sys
import torch
from torch.distributed import FileStore
from aiocomms import new_comm
from aiocomms.errors import PeerDiedError

async def main(rank):
    comm = await new_comm(sys.argv[3], store=FileStore(sys.argv[1], 3), rank=rank, size=3, timeout=100)
    if rank == 1:
        await comm.recv(torch.empty(3), 0)
        await comm.recv(torch.empty(3), 2)
        DIE
    works = [comm.recv(torch.empty(3), 1), comm.recv(torch.empty(3), 2 - rank), comm.send(torch.zeros(10**6), 1, 5)]
    await comm.send(torch.zeros(3), 1)
    for work in works:
        try:
            await work
        except PeerDiedError as error:
            print(error.peer, error)
    await comm.aclose()

asyncio.run(main(int(sys.argv[2])))
"""


def run(folder: Path, *arguments: str, stdin: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with a folder in front of what is installed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": "", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=stdin, capture_output=True, text=True,
        timeout=SUITE_HANGS, check=False,
    )  # fmt: skip


def expect_death_to_be_noticed(folder: Path, transport: str, *lost: str, die: str = "os._exit(0)") -> None:
    """One rank of three dies; the ops that the others wait for fail with its name."""
    (folder / "death.py").write_text(DEATH.replace("DIE", die))
    end, keep = os.pipe()
    try:
        with ThreadPoolExecutor() as pool:
            ranks = [
                pool.submit(run, folder, "death.py", str(folder / "store"), str(rank), transport, stdin=end)
                for rank in range(3)
            ]
            survivors = [ranks[0].result(), ranks[2].result()]
            os.close(keep)  # the processes that the dead one has left behind may end now
            keep = -1
    finally:
        os.close(end)
        if keep >= 0:
            os.close(keep)
    for survivor in survivors:
        assert survivor.returncode == 0, survivor.stderr
        assert re.findall(r"^1 (\w+) .*rank 1 has died", survivor.stdout, re.MULTILINE) == [*lost], survivor.stdout
