"""The servers of the examples and their twins over gloo, under the same load, in turns: ``make bench-serve``.

For each layout of the embedding server both run beside each other, and each phase is one's and then the other's:
clients without a pause, whose requests per second are the capacity; Poisson arrivals at 30, 60, 90 and 120 % of the
twin's capacity; 60 % beside a busy neighbour; wrk; a client that leaves; and ``kill -9`` of the last rank. Then all of
that for the text generator, whose answers are streams of tokens, which wrk does not read. See docs/benchmarks/serve.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare import FULL, about
from benchmarks.serve import phases, report, streams
from benchmarks.serve.servers import ours, twin
from benchmarks.serve.targets import Embedding

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from text_generator.train import kept


def layout(text: str) -> tuple[int, int]:
    """``TPxPP``."""
    tp, _, pp = text.partition("x")
    return int(tp), int(pp)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="that each load lasts (default: %(default)s)")
    parser.add_argument(
        "--layouts", type=layout, nargs="*", default=[(1, 2), (2, 1)], metavar="TPxPP", help="default: 1x2 2x1"
    )
    parser.add_argument(
        "--streams", type=layout, nargs="*", default=[(2, 1)], metavar="TPxPP", help="of the generator; default: 2x1"
    )
    parser.add_argument("--model", type=Path, help="of the generator; without it, that of its demo")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where serve.json, .md and .svg go")
    parser.add_argument("--report", type=Path, metavar="JSON", help="print and draw an earlier run instead")
    return parser.parse_args()


async def race(tp: int, pp: int, target: Embedding, seconds: float) -> dict[str, Any]:
    """All phases of one layout."""
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(server) for server in (ours(tp, pp), twin(tp, pp))]
        rows = await phases.loads(both, target, seconds)
        found: dict[str, Any] = {"tp": tp, "pp": pp, "rows": rows}
        found["split"] = {s.name: await phases.split(s, target, max(5, int(10 * seconds))) for s in both}
        found["wrk"] = {s.name: await phases.wrk(s, target, seconds) for s in both}
        if None in found["wrk"].values():
            found["wrk"] = None
        found["leaving"] = {s.name: await phases.leaving(s, target) for s in both}
        rate = 0.6 * rows[1]["per_s"]
        found["killed"] = {
            s.name: await phases.killed(s, target, rate, phases.KILL * seconds, tp * pp - 1) for s in both
        }
        return found


def main() -> int:
    """Measure, print, write; 1 if an answer was wrong."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.report:
        results = json.loads(options.report.read_text())
    else:
        target = Embedding.load()
        where = {key: value for key, value in about(FULL, "ucx").items() if key != "measured"}
        where["measured"] = f"each load for {options.seconds:g} s"
        layouts = [asyncio.run(race(tp, pp, target, options.seconds)) for tp, pp in options.layouts]
        path = (options.model or kept()) if options.streams else Path()
        generators = [asyncio.run(streams.race(path, tp, pp, options.seconds)) for tp, pp in options.streams]
        results = {"where": where, "layouts": layouts, "streams": generators}
        (options.out / "serve.json").write_text(json.dumps(results, indent=1) + "\n")
    text = report.markdown(results)
    (options.out / "serve.md").write_text(text)
    report.glance(results, options.out / "serve.png")
    report.curves(results, options.out / "serve-load.png")
    print(f"\n{text}")
    found = results["layouts"] + results["streams"]
    return int(any(row["wrong"] for each in found for row in each["rows"]))


if __name__ == "__main__":
    sys.exit(main())
