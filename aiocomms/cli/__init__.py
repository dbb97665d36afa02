"""The command ``aiocomms``, which starts ranks, measures operations, runs simulations, and shows running programs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from aiocomms.cli.bench.arguments import add_arguments
from aiocomms.errors import CommError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    :param arguments: the arguments without the program's name; None for the arguments of the process.
    :returns: the exit status: 1 if the input is wrong or ranks have failed, 130 after Ctrl-C.
    """
    _open_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    options.arguments = given
    try:
        return int(options.run(options))
    except (CommError, OSError, ValueError) as error:
        print(f"aiocomms {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # Ctrl-C came during the imports, for example.
        return 130


def _open_streams() -> None:
    """Open the null device for each standard stream that was closed at the start of the process.

    Otherwise a later file or socket gets the descriptor of the closed stream, and the output of ranks is written to
    that file or socket. For a closed standard stream, the attribute of ``sys`` is None.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system gives the lowest free descriptor, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aiocomms", description="asyncio-native communication for PyTorch tensors")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, transports, devices, interfaces and environment variables")
    info.add_argument("--json", action="store_true", help="print one JSON document")
    info.set_defaults(run=_info)
    bench = commands.add_parser("bench", help="measure operations: time, bandwidth, lateness of the loop")
    add_arguments(bench)
    bench.set_defaults(run=_bench)
    trace = commands.add_parser("trace", help="say from the ranks' flight recorders who is missing, and draw a trace")
    trace.add_argument("path", nargs="+", type=Path, help="files, or folders of them")
    trace.add_argument("--output", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    _add_name(trace)
    trace.set_defaults(run=_trace)
    _add_simulate(commands.add_parser("simulate", help="run a program as simulated ranks, as many seeds decide"))
    top = commands.add_parser("top", help="watch what the communicators of your processes are doing, and who waits")
    top.add_argument("target", metavar="PID|all", help="a process, or all of yours that have communicators")
    top.add_argument("--once", action="store_true", help="one frame, as always where it is no terminal")
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    _add_name(top)
    top.set_defaults(run=_top)
    _add_run(
        commands.add_parser("run", help="start the ranks of a program, and new ones in the place of those that die")
    )
    return parser


def _add_name(parser: argparse.ArgumentParser) -> None:
    what = "show only operations, lanes, streams, windows and plans of such a name: 'forth*'"
    parser.add_argument("--name", default="*", metavar="GLOB", help=what)


def _add_run(run: argparse.ArgumentParser) -> None:
    run.usage = "aiocomms run [options] (FILE.py | -m MODULE) [arguments]"
    add = run.add_argument
    add("-n", "--ranks", type=int, default=1, metavar="N", help="the ranks of this host (default: 1)")
    add("--restart", default="never", metavar="WHEN", help="when a rank dies: never (default: all end), on-failure")
    add("--max-restarts", type=int, default=8, metavar="N", help="of one rank within 60 s (default: 8)")
    add("--grace", type=float, default=30.0, metavar="SECONDS", help="between SIGTERM and SIGKILL (default: 30)")
    add("--nnodes", type=int, default=1, metavar="N", help="the hosts, each with its own aiocomms run (default: 1)")
    add("--node-rank", type=int, default=0, metavar="R", help="the number of this host (default: 0)")
    add("--rendezvous", metavar="HOST:PORT", help="where they meet, on host 0")
    add("--health", metavar="[HOST:]PORT", help="answer to GET /healthz and /readyz (HOST: 127.0.0.1)")
    add("--listen", metavar="HOST:PORT", help="open a socket for rank 0, which it finds at descriptor 3 (LISTEN_FDS)")
    add("--log-dir", metavar="DIR", help="write the output of each process to a file, too")
    add("--preload", action="append", default=[], metavar="MODULE", help="import it once for all ranks; repeatable")
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m does")
    add("program", nargs=argparse.REMAINDER, metavar="FILE.py", help="the program, and its arguments")
    run.set_defaults(run=_run)


def _add_simulate(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument("program", metavar="FILE.py:FUNCTION", help="an async function without arguments")
    simulate.add_argument("--ranks", type=int, default=2, help="how many ranks run it (default: 2)")
    simulate.add_argument("--seeds", type=int, default=100, help="run so many histories (default: 100)")
    simulate.add_argument("--seed", help="run one history: 7, or of its faults the first and the third: 7/0,2")
    for kind in ("deaths", "pauses", "slow", "cuts", "partitions", "stores"):
        simulate.add_argument(f"--{kind}", type=int, default=0, metavar="N", help="faults of this kind in each history")
    simulate.add_argument("--restarts", action="store_true", help="start a rank anew that has died")
    simulate.add_argument("--trace", type=Path, metavar="FOLDER", help="write the trace of a history that fails")
    simulate.set_defaults(run=_simulate)


# Each command imports its module only when it runs.


def _info(options: argparse.Namespace) -> int:
    from aiocomms.cli.info import run

    return run(as_json=options.json)


def _bench(options: argparse.Namespace) -> int:
    from aiocomms.cli.bench.start import run

    return run(options, options.arguments)


def _trace(options: argparse.Namespace) -> int:
    from aiocomms.cli.trace import run

    return run(options.path, options.output, options.name)


def _simulate(options: argparse.Namespace) -> int:
    from aiocomms.cli.simulating import run

    return run(options)


def _run(options: argparse.Namespace) -> int:
    from aiocomms.cli.running import run

    return run(options)


def _top(options: argparse.Namespace) -> int:
    from aiocomms.cli.top import run

    given, interval = options.target, options.interval
    if given != "all" and not (given.isascii() and given.isdigit()):
        raise ValueError(f"PID|all is {given!r}, wanted the number of a process, or all")
    if not 0.05 <= interval <= 3600:
        raise ValueError(f"--interval is {interval}, wanted 0.05 to 3600 seconds")
    return run(None if given == "all" else int(given), once=options.once, interval=interval, name=options.name)
