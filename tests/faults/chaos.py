"""``make chaos``: ranks run ops while faults of the program, the interpreter or a plug-in happen around them.

Each episode has a transport, one of the disturbances of ``disturbances.py``, and a seed. In new processes its ranks
form a communicator beside another one, run the random checked ops of ``make soak``, and close it. ``oracle.py`` checks
the ranks. The command ends non-zero at the first hang, crash, wrong data or leak. It also ends so at an error that does
not name its communicator, and at any error after a gentle disturbance.

    CHAOS_SECONDS=1800 CHAOS_SEED=7 python tests/faults/chaos.py
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

import chaos_rank  # noqa: E402 - found by the path above
import disturbances  # noqa: E402
from processes import runner  # noqa: E402

TRANSPORTS = ("local", "c10d", "ucx")


def episode(transport: str, what: str, seed: int, steps: int, counts: Counter[str]) -> None:
    """Run one episode, and count the outcomes of its ranks.

    :raises AssertionError: a rank has done what it must not.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, runner(transport, Path(folder)) as run:
        size = 1 if transport == "local" else chaos_rank.SIZE
        for outcomes in run(size, chaos_rank.play, what, seed, steps):
            assert isinstance(outcomes, list), f"a rank has crashed: {outcomes}"
            for outcome, done in outcomes:
                counts[outcome if outcome in (chaos_rank.RIGHT, chaos_rank.INTERRUPTED) else "lost"] += 1
                counts.update(done)


def main() -> int:
    """Run episodes until the time is up, and print the outcome."""
    seconds = float(os.environ.get("CHAOS_SECONDS", "30"))
    seed = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(2**31)))
    os.environ.setdefault("AIOCOMMS_RECORDER_DIR", "")
    print(f"chaos: CHAOS_SEED={seed} CHAOS_SECONDS={seconds:.0f}", flush=True)
    rng, counts, began, said = random.Random(seed), Counter[str](), time.monotonic(), 0.0
    while (elapsed := time.monotonic() - began) < seconds:
        what, transport = rng.choice(disturbances.NAMES), rng.choice(TRANSPORTS)
        own, steps = rng.randrange(2**31), rng.randrange(1, 20)
        try:
            episode(transport, what, own, steps, counts)
        except AssertionError as error:
            print(f"FAILED: {what} on {transport}, seed {own}, {steps} steps: {error}\n(CHAOS_SEED={seed})", flush=True)
            return 1
        counts[f"{what} on {transport}"] += 1
        if elapsed - said > max(10.0, seconds / 60):
            print(f"{elapsed:6.0f} s: {summary(counts)}", flush=True)
            said = elapsed
    print(f"{elapsed:6.0f} s: {summary(counts)}\n0 hangs, 0 wrong data, 0 crashes, nothing left.")
    return 0


def summary(counts: Counter[str]) -> str:
    return ", ".join(f"{value} {key}" for key, value in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
