"""Jobs under launchers, started as users start them: the results of all ranks, and a rank that exits or is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hosts import NETWORKS, hosts, inside, ip
from launched import STATUS
from processes import HANGS, free_port
from slurm import Cluster, cluster

HERE = Path(__file__).parent
MPI = HERE.parents[1] / "build" / "launchers"
"""The folder to which `make test` and `make test-launchers` install each MPI of PyPI."""
JOB = [sys.executable, str(HERE / "launched.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# The variables that a launcher around the tests, or the user, may have set.
OF_LAUNCHERS = re.compile(r"(RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|TORCHELASTIC_|OMPI_|PMI|MPI_|I_MPI_|PALS_|SLURM_)")

pytestmark = [pytest.mark.real, pytest.mark.timeout(3 * HANGS), pytest.mark.search]

Commands = Callable[[Sequence[str]], list[list[str]]]
"""A function from the job's own command to the commands that start the job, one for each host."""


@dataclass(frozen=True)
class Way:
    """A way to start a job.

    :param launcher: the launcher that aiocomms detects, or None.
    :param ranks: the host name of each rank; "" for this machine.
    :param status: the exit status if the last rank exits with :data:`STATUS` and the others fail with 1. None: that of
        the first rank that ends.
    """

    name: str
    launcher: str | None
    commands: Commands
    ranks: Sequence[str] = ("", "")
    status: int | None = None

    def __str__(self) -> str:
        return self.name

    def statuses(self) -> set[int]:
        return set(range(1, 256)) if self.status is None else {self.status}


def two_agents(job: Sequence[str]) -> list[list[str]]:
    meet = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=job"]
    return [[*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", *meet, *job[1:]] for _ in range(2)]


def processes(method: str) -> Way:
    forked = [sys.executable, str(HERE / "forked.py"), method, "2"]
    return Way(
        f"multiprocessing, {method}", "torchrun", lambda job: [[*forked, f"{free_port()}", *job[2:]]], status=STATUS
    )


def mpi(name: str, launcher: str, package: str, *command: str) -> Way:
    def commands(job: Sequence[str]) -> list[list[str]]:
        return [[installed(package, command[0]), *command[1:], "-n", "2", *job]]

    return Way(name, launcher, commands)


def installed(package: str, program: str) -> str:
    path = MPI / package / "bin" / program
    if not path.exists():
        pytest.skip(f"no {package} from PyPI: make build/launchers/{package}.stamp")
    return str(path)


OPEN_MPI = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
WAYS = [
    Way("torchrun, two agents", "torchrun", two_agents, status=1),
    processes("spawn"),
    processes("fork"),
    mpi("Open MPI 5", "Open MPI", "openmpi-5.0", *OPEN_MPI),
    mpi("Open MPI 4", "Open MPI", "openmpi-4.1", *OPEN_MPI),
    mpi("MPICH", "MPICH", "mpich-5.0", "mpiexec"),
    mpi("Intel MPI", "MPICH", "impi_rt-2021.19", "mpiexec"),
]


def in_job(nodes: int, ranks: int, *launch: str) -> Commands:
    return lambda job: [["salloc", "--quiet", f"--nodes={nodes}", f"--ntasks={ranks}", *launch, *job]]


def in_script(*launch: str) -> Commands:
    wait = ["sbatch", "--quiet", "--wait", "--nodes=2", "--ntasks=2"]
    return lambda job: [[*wait, f"--wrap={shlex.join([*launch, *job])}"]]


def in_mpi(package: str, *command: str) -> Commands:
    return lambda job: in_job(2, 4, installed(package, command[0]), *command[1:])(job)


def agents(job: Sequence[str]) -> list[list[str]]:
    agent = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400"]
    starts = ["srun", "--nodes=2", "--ntasks-per-node=1", str(Path(sys.executable).with_name(agent[0])), *agent[1:]]
    return [[*starts, *job[1:]]]


TWO, FOUR = ("node1", "node2"), ("node1", "node1", "node2", "node2")
OF_SLURM = [
    Way("srun on one node", "Slurm", lambda job: [["srun", "--nodes=1", "--ntasks=2", *job]], ("node1",) * 2, STATUS),
    Way("srun on two", "Slurm", lambda job: [["srun", "--nodes=2", "--ntasks-per-node=2", *job]], FOUR, STATUS),
    Way("srun --mpi=pmi2", "Slurm", lambda job: [["srun", "--mpi=pmi2", "--nodes=2", "--ntasks=2", *job]], TWO, STATUS),
    Way("srun in a batch script", "Slurm", in_script("srun"), TWO, STATUS),
    Way("a batch script alone", None, in_script(), TWO[:1], STATUS),
    Way("a shell of salloc", None, in_job(2, 2), ("login",), STATUS),
    Way("Open MPI 5 in a job", "Open MPI", in_mpi("openmpi-5.0", *OPEN_MPI, "--map-by", "ppr:2:node"), FOUR),
    Way("Open MPI 4 in a job", "Open MPI", in_mpi("openmpi-4.1", *OPEN_MPI, "--map-by", "ppr:2:node"), FOUR),
    Way("MPICH in a job", "MPICH", in_mpi("mpich-5.0", "mpiexec", "-ppn", "2", "-n", "4"), FOUR),
    Way("torchrun by srun", "torchrun", agents, FOUR, 1),
]


def run(commands: Sequence[Sequence[str]], folder: Path, **variables: str) -> list[int]:
    """Run all commands at the same time, and check that none of their processes is left.

    :returns: their exit statuses.
    """
    clean = {name: value for name, value in os.environ.items() if not OF_LAUNCHERS.match(name)}
    env = clean | {"OMP_NUM_THREADS": "1"} | variables
    started = [subprocess.Popen(it, cwd=folder, env=env, start_new_session=True) for it in commands]
    try:
        statuses = [it.wait(timeout=HANGS) for it in started]
        gone, left = psutil.wait_procs(list(members(folder)), timeout=HANGS)
        assert not left, f"{left} are left behind, {gone} have ended"
        return statuses
    finally:
        for it in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(it.pid, signal.SIGKILL)
            it.wait()


def members(folder: Path) -> Iterator[psutil.Process]:
    """Yield the processes of a job: their command lines contain its folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(str(folder) in word for word in process.cmdline()):
                yield process


def told(folder: Path) -> list[Mapping[str, object]]:
    """Return the results that the ranks have written."""
    return [json.loads(it.read_text()) for it in sorted(folder.glob("rank *"))]


def wanted(way: Way) -> list[Mapping[str, object]]:
    size, here = len(way.ranks), os.uname().nodename
    return [
        {"launcher": way.launcher, "rank": rank, "size": size, "host": host or here, "sum": size,
         "received": (rank - 1) % size}
        for rank, host in enumerate(way.ranks)
    ]  # fmt: skip


QUICK = ["multiprocessing, fork", "Open MPI 5", "MPICH"]
"""One way of each kind. Another test covers torchrun."""


@pytest.mark.parametrize(
    "way", [pytest.param(it, marks=[] if it.name in QUICK else pytest.mark.search) for it in WAYS], ids=str
)
def test_launched_job_runs_on_every_rank(way: Way, tmp_path: Path) -> None:
    assert set(run(way.commands([*JOB, str(tmp_path), "end well"]), tmp_path)) == {0}
    assert told(tmp_path) == wanted(way)


@pytest.mark.search
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_rank_that_exits_with_an_error_ends_the_job(way: Way, tmp_path: Path) -> None:
    assert set(run(way.commands([*JOB, str(tmp_path), "leave"]), tmp_path)) <= way.statuses()
    assert told(tmp_path) == []


def test_torchrun_restarts_a_killed_rank_and_the_job_forms_again(tmp_path: Path) -> None:
    """The other agent's rank restarts too. The job forms again in the store of the agent whose rank was not killed."""
    assert run(two_agents([*JOB, str(tmp_path), "be killed once"]), tmp_path) == [0, 0]
    assert (tmp_path / "killed").exists()
    assert told(tmp_path) == wanted(WAYS[0])


def test_job_runs_on_hosts_without_ipv4(tmp_path: Path) -> None:
    """The job has two such hosts, and the test itself starts their ranks."""
    known = tmp_path / "hosts"
    known.write_text("fd77::1 host0\nfd77::2 host1\n")
    with hosts(2) as names:
        commands = []
        for rank, name in enumerate(names):
            for network in NETWORKS:
                ip("-n", name, "-4", "address", "flush", "dev", network)
            ip("-n", name, "address", "add", f"fd77::{rank + 1}/64", "dev", "net0", "nodad")
            commands.append(inside(name, f"host{rank}", known, "env", f"RANK={rank}", *JOB, str(tmp_path), "end well"))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
        assert run(commands, tmp_path, AIOCOMMS_TOKEN=secrets.token_hex(16), **place) == [0, 0]
    assert told(tmp_path) == wanted(Way("", "torchrun", lambda job: [list(job)], ("host0", "host1")))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a Slurm cluster of a login node and two nodes, each a network namespace with its own name."""
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.mark.parametrize("way", OF_SLURM, ids=str)
def test_slurm_job_runs_on_every_rank(way: Way, slurm: Cluster, tmp_path: Path) -> None:
    (command,) = way.commands([*JOB, str(tmp_path), "end well"])
    variables = {**slurm.variables, "AIOCOMMS_TOKEN": secrets.token_hex(16)}
    assert run([slurm.login(*command)], tmp_path, **variables) == [0], slurm.outputs()
    assert told(tmp_path) == wanted(way)


@pytest.mark.parametrize("way", OF_SLURM, ids=str)
def test_rank_that_exits_with_an_error_ends_the_slurm_job(way: Way, slurm: Cluster, tmp_path: Path) -> None:
    (command,) = way.commands([*JOB, str(tmp_path), "leave"])
    variables = {**slurm.variables, "AIOCOMMS_TOKEN": secrets.token_hex(16)}
    assert set(run([slurm.login(*command)], tmp_path, **variables)) <= way.statuses(), slurm.outputs()
    assert told(tmp_path) == []
