"""UCX's own benchmark, from the wheel that brings UCX: what the library below can do, without Python.

It is a process pair per trial, pinned as the ranks are. Which transports it may use is tried out.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from functools import partial
from pathlib import Path

import libucx

from aiocomms.cli.bench.machine import bind

TESTS = {"send": "tag_lat", "send_burst": "tag_bw", "get": "ucp_get"}
TRANSPORTS = {"cma": "cma,posix,self", "posix": "posix,self", "sysv": "sysv,self"}
"""The transports of a host, quickest for large messages or not: it depends on the machine."""

HOME = Path(libucx.__file__).parent
PATIENCE = 30.0


class PerftestFailedError(Exception):
    """A run of ucx_perftest that did not start, or not end."""


class Perftest:
    """One test with one choice of transports."""

    def __init__(self, op: str, nbytes: int, transport: str) -> None:
        self.op, self.nbytes, self.transport = op, nbytes, transport
        self._n = 200 if nbytes > 2**16 else 100_000

    def trial(self) -> float:
        """Seconds per message.

        :raises PerftestFailedError: it failed.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        server = self._start(0, port)
        try:
            ends = time.monotonic() + PATIENCE
            while True:  # the client gives up at once where nobody listens yet
                time.sleep(0.1)
                client = self._start(1, port, "127.0.0.1")
                try:
                    out, errors = client.communicate(timeout=PATIENCE)
                except subprocess.TimeoutExpired:
                    client.kill()
                    client.communicate()
                    raise PerftestFailedError("ucx_perftest did not end") from None
                if client.returncode == 0 and "overall_lat" in out:
                    break
                if time.monotonic() > ends or server.poll() is not None:
                    raise PerftestFailedError(f"ucx_perftest failed: {errors.strip() or out.strip()}")
        finally:
            server.kill()
            server.communicate()
        header, values = (line.strip().split(",") for line in out.strip().splitlines()[-2:])
        row = dict(zip(header, values, strict=True))
        return float(row["overall_lat"]) * 1e-6

    def _start(self, rank: int, port: str, *address: str) -> subprocess.Popen[str]:
        env = os.environ | {"LD_LIBRARY_PATH": str(HOME / "lib"), "UCX_TLS": TRANSPORTS[self.transport]}
        options = ["-t", TESTS[self.op], "-s", str(self.nbytes), "-n", str(self._n), "-p", port]
        return subprocess.Popen(
            [str(HOME / "bin" / "ucx_perftest"), *address, *options, "-w", str(self._n // 10), "-f", "-v"],
            env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=partial(bind, rank, 2),
        )  # fmt: skip
