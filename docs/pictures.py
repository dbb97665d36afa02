"""Makes the pictures of docs/diagnosis.md: ``make pictures``. What they show is of processes that run meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import perfetto
from rich.console import Console
from torch.distributed import TCPStore

from aiocomms.cli import main
from aiocomms.cli.top.drawing import drawn
from aiocomms.cli.top.looking import Top, TopFrame

DOCS = Path(__file__).parent
WIDTH = 130
"""Columns of the terminal."""
RANKS = 3
PROGRAM = """
import asyncio
import torch
import aiocomms

async def decode(comm):
    t = torch.ones(4096)
    for step in range(40):
        await asyncio.sleep(0.01 * (comm.rank == step % 3))  # what it computes
        await comm.all_reduce(t)
    if comm.rank == 2:
        await comm.recv(t, src=1, tag=7)
    await comm.all_reduce(t)

async def main():
    async with aiocomms.new_comm("c10d", name="tp") as comm:
        if comm.rank < 2:
            tokens = await comm.open_stream(1 - comm.rank, name="tokens")
            for token in range(5 * comm.rank):
                await tokens.send(torch.tensor([token]))
        await asyncio.create_task(decode(comm), name="request 17")

asyncio.run(main())
"""


@contextlib.contextmanager
def astray(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Ranks of which one waits for a message that nobody sends, while the others reduce."""
    (folder / "serve.py").write_text(PROGRAM.lstrip())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    records = {"AIOCOMMS_RECORDER_SIGNAL": "1", "AIOCOMMS_RECORDER_DIR": str(folder / "records")}
    common = os.environ | places | records | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    run = [sys.executable, "-c", "exec(compile(open('serve.py').read(), 'serve.py', 'exec'))"]  # by a short name
    ranks = [
        subprocess.Popen(run, cwd=folder, env=common | {"RANK": str(rank)}, stderr=subprocess.DEVNULL)
        for rank in range(RANKS)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def waiting(top: Top) -> TopFrame:
    """What is shown of that communicator alone once all of its ranks have waited for some seconds."""
    while True:
        time.sleep(1)
        frame = top.look()
        for group in frame.groups:
            ages = [sight.statistics.oldest or 0.0 for sight in group.ranks.values()]
            if group.comm == "tp" and len(ages) == RANKS and min(ages) > 4:
                return frame._replace(groups=[group], notes=[])


def top_svg(frame: TopFrame, picture: Path) -> None:
    """``aiocomms top all``, as rich draws its terminal."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, highlight=False)
        console.print(drawn(frame))
    svg = console.export_svg(title="aiocomms top all")
    picture.write_text(re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL))  # no font from another host
    print(picture)


def trace_png(ranks: list[subprocess.Popen[bytes]], folder: Path, picture: Path) -> None:
    """``aiocomms trace --output``, as Perfetto's viewer shows it."""
    for rank in ranks:
        rank.send_signal(signal.SIGUSR1)
    records, trace = folder / "records", folder / "trace.json"
    while not records.exists() or sum(path.read_text().endswith("\n") for path in records.iterdir()) < RANKS:
        time.sleep(0.1)
    main(["trace", str(records), "--output", str(trace)])
    with perfetto.viewer(trace, 1100, 680) as viewer:
        [[row]] = viewer.query("select id from slice where name glob 'recv(src=1, tag=7)*'", id=0)
        viewer.page.evaluate("row => app.trace.selection.selectSqlEvent('slice', row)", row)
        viewer.page.get_by_text("serve.py:").first.scroll_into_view_if_needed()  # the last of its arguments
        viewer.page.wait_for_timeout(1000)  # until all is drawn
        viewer.page.screenshot(path=picture)
    print(picture)


if __name__ == "__main__":
    import tempfile

    if perfetto.absent():
        sys.exit(f"no picture of Perfetto's viewer: {perfetto.absent()}")
    with tempfile.TemporaryDirectory() as where, astray(Path(where)) as started:
        top_svg(waiting(Top(None)), DOCS / "top.svg")
        trace_png(started, Path(where), DOCS / "trace.png")
