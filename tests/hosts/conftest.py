"""Fixtures for the hosts of aiocomms, such as Ray: `make test-hosts`, in an environment that has them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import PATIENCE

MIB = 2**20
ROOT = Path(__file__).parents[2]
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # keeps Ray from writing a token into the home directory
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "AIOCOMMS_HEARTBEAT": "0",  # a stopped source must not count as dead before the test kills it
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, ROOT / "examples"))),  # where workers find actors
}


@pytest.fixture(autouse=True)
def _files_are_closed() -> None:
    """Disable the check for open files: Ray's driver keeps the logs of its last session open."""


@pytest.fixture(scope="module")
def ray_folder() -> Iterator[Path]:
    """Yield the folder of Ray's files. At the end, require that all of Ray's processes have ended, and remove it."""
    before = dict(os.environ)
    os.environ.update(QUIET)
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # a short name, because the paths of sockets have a maximum length
    try:
        yield folder
    finally:
        _, left = psutil.wait_procs(running(folder), PATIENCE)  # Ray does not wait for all processes that it ends
        left += running(folder)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left)
        shutil.rmtree(folder)
        os.environ.clear()
        os.environ.update(before)
    assert left == []


def running(folder: Path) -> list[psutil.Process]:
    """Return the processes that have a folder in their command line."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if str(folder) in " ".join(process.info["cmdline"] or [])]


@pytest.fixture(scope="module")
def cluster(ray_folder: Path) -> Iterator[None]:
    """Run a Ray cluster of one node with 2 CPUs."""
    import ray

    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80 * MIB, _temp_dir=str(ray_folder),
        logging_level="warning",
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()
