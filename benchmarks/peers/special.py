"""What is no race: many receives, a busy peer, the heartbeat, idling, the death of a peer. The driver's part."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.race import Pace, paired
from benchmarks.peers.world import ContenderFailedError, World

MIB = 2**20
Result = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""Figures and verdicts, as a race has them."""


def verdict(what: str, value: float, unit: str, must: float, aim: float | None = None) -> dict[str, Any]:
    """A figure with its limits."""
    return {"what": what, "value": value, "unit": unit, "must": must, "aim": aim}


def figure(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """Median, and the 99th percentile, or the worst of fewer than 100."""
    ordered = sorted(seconds)
    p99 = ordered[-1 - len(ordered) // 100]
    return {
        "name": name, "median_us": statistics.median(ordered) * 1e6, "p99_us": p99 * 1e6, "gb_per_s": None,
        "iterations": len(ordered), "rounds_us": [s * 1e6 for s in seconds],
    }  # fmt: skip


def with_world(transport: str, probe: Callable[[World], Any], size: int = 2) -> Any:
    """Run it on ranks of its own."""
    world = World("ours", size, transport)
    try:
        answer = probe(world)
        world.close()
    finally:
        world.kill()
    return answer


def many_recvs(transport: str, pace: Pace) -> Result:
    """10,000 outstanding receives against 100."""
    grown, traced = with_world(transport, lambda world: world.ask("probe", "memory_of_recvs", 10_000)[0])
    few: list[float | None] = []
    many: list[float | None] = []

    def run(world: World) -> None:
        world.ask("probe", "outstanding", 1_000, 1)
        for _ in range(max(3, pace.rounds // 2)):
            few.append(world.ask("probe", "outstanding", 100, 100)[0])
            many.append(world.ask("probe", "outstanding", 10_000, 1)[0])

    with_world(transport, run)
    figures = [figure("100 outstanding, each", few), figure("10,000 outstanding, each", many)]  # type: ignore[arg-type]
    # Growth misses what was freed before and is used again, tracing misses what is not Python's: the larger counts.
    return figures, [
        verdict("time each / with 100", paired(many, few), "x", 1.5, 1.1),
        verdict("memory each, beyond the tensor", max(grown, traced), "B", 1024.0),
    ]


def busy_peer(transport: str, pace: Pace) -> Result:
    """How long an all_reduce takes whose peer computes without awaiting."""
    figures, verdicts = [], []
    for nbytes, title in ((8, "8 B"), (MIB, "1 MiB")):
        took = with_world(transport, lambda w, n=nbytes: w.ask("probe", "busy_peer", n, max(5, pace.rounds))[0])
        figures.append(figure(f"all_reduce {title}", took))
        verdicts.append(verdict(f"await of {title}", statistics.median(took) * 1e3, "ms", 5.0))
    return figures, verdicts


def heartbeat(transport: str, pace: Pace) -> Result:
    """How late a task that sleeps for 1 ms wakes beside 64 MiB all_reduces; the worse rank."""
    answers = with_world(transport, lambda w: w.ask("probe", "heartbeat", 64 * MIB, 10 * pace.rounds))
    idle = max((figure("idle loop, late by", idle) for idle, _ in answers), key=lambda f: f["p99_us"])
    busy = max((figure("beside all_reduces, late by", busy) for _, busy in answers), key=lambda f: f["p99_us"])
    return [idle, busy], [verdict("lateness at p99", busy["p99_us"] / 1e3, "ms", 1.5, 1.0)]


def overhead(transport: str, pace: Pace) -> Result:
    """What the flight recorder and the heartbeat cost; the slower rank's time."""
    figures, verdicts = [], []
    for nbytes, title, ops in ((8, "8 B", 2_000), (MIB, "1 MiB", 50)):
        turns = []
        for _ in range(5):  # where things lie in memory is a matter of luck, so several times
            run = partial(in_turn, nbytes, ops, 2 * pace.rounds)
            turns += with_world(transport, lambda one, run=run: with_world(transport, partial(run, one)))
        whole, bare = ([it[at] for it in turns] for at in (0, 1))
        figures += [figure(f"all_reduce {title}", whole), figure(f"all_reduce {title}, without both", bare)]
        verdicts.append(verdict(f"{title}: time / without", paired(whole, bare), "x", 1.02, 1.01))
    return figures, verdicts


def in_turn(nbytes: int, ops: int, rounds: int, whole: World, bare: World) -> list[tuple[float, float]]:
    """Seconds per all_reduce as it is, and without both.

    In processes of their own: the heartbeat is a matter of a whole process.
    """
    turns = []
    for world in (whole, bare):
        world.freeze()
    for turn in range(rounds):
        means = {}
        for world in (whole, bare) if turn % 2 else (bare, whole):
            with world.awake():
                means[world] = max(world.ask("probe", "overhead", nbytes, ops, world is bare))
        turns.append((means[whole], means[bare]))
    return turns


def usage(pid: int) -> tuple[float, int]:
    """Seconds on a core, and how often it woke from a wait: all threads of a process so far."""
    seconds, wakes = 0.0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        seconds += int((task / "schedstat").read_text().split()[0]) * 1e-9
        status = (task / "status").read_text()
        wakes += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return seconds, wakes


def idling(transport: str, pace: Pace) -> Result:
    """CPU time and wake-ups of ranks whose loops have nothing to do; seen from outside, the busier rank's."""
    seconds = 2.0

    def run(world: World, waiting: bool) -> tuple[float, int]:
        world.tell("probe", "idle", waiting, seconds + 1)
        world.collect()
        time.sleep(0.5)
        before = [usage(pid) for pid in world.pids.values()]
        time.sleep(seconds)
        after = [usage(pid) for pid in world.pids.values()]
        world.collect()
        spent = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)]
        return max(cpu for cpu, _ in spent), max(wakes for _, wakes in spent)

    cpu, _ = with_world(transport, lambda world: run(world, True))
    _, wakes = with_world(transport, lambda world: run(world, False))
    return [], [
        verdict("CPU while a recv never comes", 100 * cpu / seconds, "%", 1.0),
        verdict(f"wake-ups in {seconds:.0f} s with nothing pending", wakes, "", 0.0),
    ]


def death(transport: str, pace: Pace) -> Result:
    """``kill -9`` of one of three ranks: when the last pending work of the others has ended, and with which error."""
    victim, took, wrong = 2, [], 0

    def run(world: World) -> None:
        nonlocal wrong
        world.tell("probe", "survive", victim)
        world.collect()
        time.sleep(0.2)
        killed = time.monotonic()
        os.kill(world.pids[victim], signal.SIGKILL)
        ends = [end for answer in world.collect([0, 1]) for end in answer.values()]
        took.append(max(at for at, _, _ in ends) - killed)
        wrong += sum((name, peer) != ("PeerDiedError", victim) for _, name, peer in ends)
        world.kill()

    for _ in range(min(3, pace.rounds)):
        world = World("ours", 3, transport)
        try:
            run(world)
        finally:
            world.kill()
    return [figure("until the last pending work ended", took)], [
        verdict("until the last pending work ended", max(took) * 1e3, "ms", 1000.0),
        verdict("works that ended otherwise than by PeerDiedError naming the rank", wrong, "", 0.0),
    ]


SPECIAL: dict[str, Callable[[str, Pace], Result]] = {
    "10,000 outstanding recvs": many_recvs,
    "peer computes for 200 ms after posting": busy_peer,
    "1 ms heartbeat during 64 MiB all_reduces": heartbeat,
    "flight recorder and heartbeat": overhead,
    "idle": idling,
    "kill -9 of a peer": death,
}


def run_special(title: str, transport: str, pace: Pace) -> dict[str, Any]:
    """One of them, as a race's result."""
    try:
        figures, verdicts = SPECIAL[title](transport, pace)
        failures = []
    except ContenderFailedError as error:
        figures, verdicts, failures = [], [], [f"{title}: {error}"]
    return {"title": title, "ours": "", "figures": figures, "verdicts": verdicts, "failures": failures}
