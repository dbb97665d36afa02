from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from processes import HANGS

from aiocomms.bootstrap.launchers import Launch, expand_hostlist, read_environment
from aiocomms.errors import ArgumentError

pytestmark = pytest.mark.deterministic

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node01", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-6173@1",
}
OPEN_MPI_4 = OPEN_MPI | {"PMIX_NAMESPACE": "2075131905", "OMPI_MCA_ess_base_jobid": "2075131905"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "9"}
INTEL_MPI = MPICH | {"I_MPI_HYDRA_UUID": "ef120000-ae50-8f3d-ba60-06008d122713"}
PALS = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_SIZE": "2", "PALS_APID": "0d8d4a3e-7a39-4d0c-9b9e-0a1c3f2b1d5e"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[02-03]",
    "SLURM_JOB_NODELIST": "node[01-03]",
}
# Slurm sets these in the shell of sbatch, in the shell of salloc, and in the interactive step of salloc.
SLURM_BATCH = {
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_JOB_NODELIST": "vm",
}
SLURM_SALLOC = {name: value for name, value in SLURM_BATCH.items() if name != "SLURM_PROCID"}
SLURM_INTERACTIVE = SLURM_BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
# srun starts mpiexec's proxies, one per host, and these start the ranks.
HYDRA_IN_SLURM = SLURM | MPICH | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "2"}
MPICH_ON_TWO_NODES = HYDRA_IN_SLURM | {"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "4"}
SRUN_PMI2 = SLURM | {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_JOBID": "7.0", "PMI_FD": "13"}


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "launcher", "rank", "size", "host"),
    [
        pytest.param(TORCHRUN, "torchrun", 1, 4, "node01", id="env://"),
        pytest.param(TORCHRUN | SLURM | OPEN_MPI | MPICH, "torchrun", 1, 4, "node01", id="torchrun under all others"),
        pytest.param(OPEN_MPI, "Open MPI", 1, 2, "127.0.0.1", id="Open MPI 5"),
        pytest.param(OPEN_MPI_4, "Open MPI", 1, 2, "127.0.0.1", id="Open MPI 4"),
        pytest.param(OPEN_MPI | SLURM, "Open MPI", 1, 2, "127.0.0.1", id="Open MPI in a Slurm step"),
        pytest.param(OPEN_MPI | SLURM_BATCH, "Open MPI", 1, 2, "127.0.0.1", id="Open MPI in a batch script"),
        pytest.param(OPEN_MPI | {"WORLD_SIZE": "2"}, "Open MPI", 1, 2, "127.0.0.1", id="WORLD_SIZE is no launcher"),
        pytest.param(INTEL_MPI, "MPICH", 1, 2, "127.0.0.1", id="Intel MPI"),
        pytest.param(PALS, "MPICH", 1, 2, "127.0.0.1", id="PALS"),
        pytest.param(HYDRA_IN_SLURM, "MPICH", 1, 2, "127.0.0.1", id="hydra in a Slurm step of its own"),
        pytest.param(MPICH_ON_TWO_NODES, "MPICH", 1, 4, "node01", id="hydra on the job's nodes"),
        pytest.param(
            OPEN_MPI | SLURM_BATCH | {"OMPI_COMM_WORLD_SIZE": "4", "SLURM_JOB_NODELIST": "node[01-02]"},
            "Open MPI", 1, 4, "node01", id="Open MPI on the job's nodes",
        ),
        pytest.param(SLURM, "Slurm", 1, 4, "node02", id="srun"),
        pytest.param(SRUN_PMI2, "Slurm", 1, 4, "node02", id="srun --mpi=pmi2"),
        pytest.param(SLURM | {"SLURM_NTASKS": "8"}, "Slurm", 1, 4, "node02", id="srun --preserve-env"),
        pytest.param(SLURM | {"SLURM_STEP_NODELIST": "gpu7"}, "Slurm", 1, 4, "127.0.0.1", id="srun on one host"),
        pytest.param(without(SLURM, "SLURM_STEP_NODELIST"), "Slurm", 1, 4, "node01", id="the job's hosts"),
    ],
)  # fmt: skip
def test_launcher_is_recognised_by_its_environment(env, launcher, rank, size, host):
    launch = read_environment(env)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.size, launch.host) == (launcher, rank, size, host)
    assert launch.port == 29500 if launcher == "torchrun" else launch.port in range(20000, 32000)
    assert launch.agent_store is False
    assert launch.elsewhere == (launcher != "torchrun" and host != "127.0.0.1")


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"MASTER_ADDR": "node01", "MASTER_PORT": "29500"}, id="an address alone"),
        pytest.param({"RANK": "", "WORLD_SIZE": " "}, id="empty"),
        pytest.param(SLURM_BATCH, id="batch shell"),
        pytest.param(SLURM_SALLOC, id="salloc shell"),
        pytest.param(SLURM_INTERACTIVE, id="interactive step"),
        pytest.param(SLURM_INTERACTIVE | {"SLURM_STEP_ID": "-6"}, id="interactive step, printed as signed"),
    ],
)
def test_environment_without_a_launcher_gives_no_launch(env):
    assert read_environment(env) is None


@pytest.mark.fault(92)
@pytest.mark.parametrize(
    ("env", "launcher", "missing"),
    [
        pytest.param(without(SLURM, "SLURM_STEP_ID"), "Slurm", ["SLURM_STEP_ID"], id="srun's task without its step"),
        pytest.param(SLURM_BATCH | {"SLURM_PROCID": "1"}, "Slurm", ["SLURM_STEP_ID"], id="a job's second task"),
        pytest.param(
            without(SLURM, "SLURM_PROCID", "SLURM_STEP_ID"), "Slurm", ["SLURM_STEP_ID", "SLURM_PROCID"], id="a step"
        ),
        pytest.param({"LOCAL_RANK": "1"}, "torchrun", ["RANK", "WORLD_SIZE", "MASTER_ADDR"], id="LOCAL_RANK alone"),
        pytest.param(
            without(OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            "Open MPI", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"], id="Open MPI",
        ),
        pytest.param(without(MPICH, "PMI_RANK", "PMI_SIZE"), "MPICH", ["PMI_RANK", "PMI_SIZE"], id="MPICH"),
        pytest.param({"PALS_RANKID": "1"}, "MPICH", ["PMI_RANK", "PMI_SIZE"], id="PALS"),
        pytest.param({"PMIX_RANK": "1"}, "PMIx", ["RANK", "WORLD_SIZE", "MASTER_ADDR"], id="PMIx"),
    ],
)  # fmt: skip
def test_incomplete_environment_of_a_launcher_is_refused(env, launcher, missing):
    with pytest.raises(ArgumentError) as caught:
        read_environment(env)
    text = str(caught.value)
    assert text.startswith(f"the environment of {launcher} is not complete: ")
    for name in missing:
        assert f"{name} is missing" in text
    there = text.partition("; there are ")[2].split(", ")
    assert there
    assert set(there) <= set(env)


@pytest.mark.fault(92)
@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        ({}, "INFO", "no launcher gives a rank: this process is a world of one"),
        (SLURM_SALLOC, "WARNING", "SLURM_JOB_ID=1, SLURM_NTASKS=2"),
        (SLURM_BATCH, "WARNING", "SLURM_JOB_ID=1, SLURM_NTASKS=2, SLURM_PROCID=0"),
        (SLURM_BATCH | {"SLURM_NTASKS": "1"}, "INFO", "a rank: this process is a world of one"),
        ({"MASTER_ADDR": "node01"}, "WARNING", "MASTER_ADDR=node01"),
        ({"JOB_COMPLETION_INDEX": "3"}, "WARNING", "JOB_COMPLETION_INDEX=3"),  # a pod of an indexed Job of Kubernetes
    ],
)
def test_single_rank_without_a_launcher_is_logged(env, level, says, caplog):
    caplog.set_level("INFO", "aiocomms")
    assert read_environment(env) is None
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("aiocomms", level)
    assert says in record.getMessage()


@pytest.mark.parametrize(("value", "agent_store"), [("True", True), ("False", False), ("1", False)])
def test_the_agent_store_is_read_as_torch_reads_it(value, agent_store):
    launch = read_environment(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": value})
    assert launch == Launch("torchrun", 1, 4, "node01", 29500, agent_store)


@pytest.mark.parametrize("host", ["node01", "rank_0.job", "10.0.0.1", "::1", "fe80::1%eth0"])
def test_master_addr_may_be_a_name_or_an_address(host):
    launch = read_environment(TORCHRUN | {"MASTER_ADDR": host})
    assert launch is not None
    assert launch.host == host


@pytest.mark.parametrize("env", [OPEN_MPI, INTEL_MPI, SLURM], ids=["Open MPI", "MPICH", "Slurm"])
def test_master_addr_and_port_override_the_launchers(env):
    launch = read_environment(env | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"})
    assert launch is not None
    assert (launch.host, launch.port) == ("10.0.0.1", 5)


@pytest.mark.parametrize(
    ("env", "other"),
    [
        (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-vm-6174@1"}),
        (INTEL_MPI, {"I_MPI_HYDRA_UUID": "ef120000-ae50-8f3d-ba60-06008d122714"}),
        (PALS, {"PALS_APID": "another"}),
        (SLURM, {"SLURM_STEP_ID": "1"}),
        (SLURM, {"SLURM_JOB_ID": "8"}),
    ],
)
def test_ranks_of_a_job_derive_one_port_that_differs_from_other_jobs(env, other):
    rank = next(name for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if name in env)
    here, there, stranger = (read_environment(env | change) for change in ({}, {rank: "0"}, other))
    assert here is not None
    assert there is not None
    assert stranger is not None
    assert here.port == there.port != stranger.port


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch("torchrun", 0, 1, None, None, False)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launch("MPICH", 0, 1, None, None, False)),
    ],
)
def test_launch_of_one_rank_needs_no_address(env, launch):
    assert read_environment(env) == launch


@pytest.mark.parametrize(
    ("env", "complaints"),
    [
        pytest.param(
            {"RANK": "0"},
            ["environment of torchrun", "WORLD_SIZE is missing", "MASTER_ADDR is missing", "MASTER_PORT is missing"],
            id="RANK alone",
        ),
        pytest.param({"WORLD_SIZE": "4"}, ["RANK is missing", "MASTER_ADDR is missing"], id="WORLD_SIZE alone"),
        pytest.param(
            TORCHRUN | {"MASTER_PORT": "abc", "RANK": "5"},
            [
                "MASTER_PORT is 'abc', wanted an integer in 1..65535",
                "RANK is 5, wanted 0 <= RANK < WORLD_SIZE=4",
            ],
            id="two mistakes",
        ),
        pytest.param(TORCHRUN | {"RANK": "-1"}, ["RANK is '-1', wanted an integer >= 0"], id="negative"),
        pytest.param(TORCHRUN | {"RANK": "1_0"}, ["RANK is '1_0', wanted an integer >= 0"], id="underscore"),
        pytest.param(TORCHRUN | {"WORLD_SIZE": "0"}, ["WORLD_SIZE is '0', wanted an integer >= 1"], id="no ranks"),
        pytest.param(TORCHRUN | {"MASTER_PORT": "0"}, ["MASTER_PORT is '0'"], id="port 0"),
        pytest.param(TORCHRUN | {"MASTER_PORT": "65536"}, ["MASTER_PORT is '65536'"], id="port too large"),
        pytest.param(TORCHRUN | {"MASTER_PORT": "9" * 5000}, ["MASTER_PORT is '999"], id="port far too large"),
        pytest.param(
            TORCHRUN | {"MASTER_ADDR": "node01:29500"},
            ["MASTER_ADDR is 'node01:29500', wanted a name or an IP address, without port or brackets"],
            id="an address with its port",
        ),
        pytest.param(TORCHRUN | {"MASTER_ADDR": "[::1]"}, ["MASTER_ADDR is '[::1]', wanted a name"], id="brackets"),
        pytest.param(TORCHRUN | {"MASTER_ADDR": "tcp://node01"}, ["MASTER_ADDR is 'tcp://node01'"], id="a URL"),
        pytest.param(TORCHRUN | {"MASTER_ADDR": ""}, ["MASTER_ADDR is missing"], id="empty"),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"},
            ["the environment of Open MPI", "MASTER_ADDR is missing (the host on which rank 0 runs)"],
            id="Open MPI on two hosts",
        ),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
            ["OMPI_COMM_WORLD_LOCAL_SIZE is '3', wanted an integer in 1..2"],
            id="more ranks here than there are",
        ),
        pytest.param(without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_SIZE is missing"], id="no size"),
        pytest.param(without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), ["OMPI_COMM_WORLD_RANK is missing"], id="no rank"),
        pytest.param(
            MPICH | {"MPI_LOCALNRANKS": "1", "MASTER_ADDR": "node01"},
            ["the environment of MPICH", "MASTER_PORT is missing"],
            id="MPICH names no job",
        ),
        pytest.param(
            SLURM | {"SLURM_STEP_NODELIST": "node[01-"},
            ["the environment of Slurm is", "SLURM_STEP_NODELIST is 'node[01-', wanted hosts as node[01-04],gpu3"],
            id="half a host list",
        ),
        pytest.param(
            without(SLURM, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), ["SLURM_NTASKS is missing"], id="Slurm, no size"
        ),
        pytest.param(
            SLURM | {"SLURM_PROCID": "4"},
            ["SLURM_PROCID is 4, wanted 0 <= SLURM_PROCID < SLURM_STEP_NUM_TASKS=4"],
            id="Slurm, rank too large",
        ),
    ],
)
def test_environment_error_lists_every_wrong_variable(env, complaints):
    with pytest.raises(ArgumentError) as caught:
        read_environment(env)
    for complaint in complaints:
        assert complaint in str(caught.value)


def test_environment_error_lists_only_wrong_variables():
    with pytest.raises(ArgumentError) as caught:
        read_environment(TORCHRUN | {"MASTER_PORT": "abc"})
    assert str(caught.value) == (
        "the environment of torchrun is not complete: MASTER_PORT is 'abc', wanted an integer in 1..65535"
    )


# These are the names that Slurm 22.05's `scontrol show hostnames` prints.
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-04,07],gpu3", "node01 node02 node03 node04 node07 gpu3"),
        ("a[1-2]b[1-3]", "a1b1 a1b2 a1b3 a2b1 a2b2 a2b3"),
        ("rack[0-1]n[09-11],x", "rack0n09 rack0n10 rack0n11 rack1n09 rack1n10 rack1n11 x"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-102]", "n098 n099 n100 n101 n102"),
        ("a,b[3],c-1[2-2]", "a b3 c-12"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_hostlists_expand_as_scontrol_expands_them(text, hosts):
    assert list(expand_hostlist(text)) == hosts.split()


@pytest.mark.parametrize("text", ["", "a,,b", "n[", "n]", "n[1", "n[]", "n[1-]", "n[3-1]", "n[a-b]", "n[[1]]", "a b"])
def test_malformed_hostlist_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        list(expand_hostlist(text))


def test_huge_hostlist_range_expands_lazily():
    assert next(expand_hostlist("n[0-999999999999]")) == "n0"


def compress(hosts):
    """Return a host list as Slurm's controller writes it: neighbours that differ by one share a range."""
    parts = []
    for (prefix, width), group in groupby(hosts, key=lambda host: (host[0], len(host[1]))):
        numbers = [int(number) for _, number in group]
        runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
        ranges = [[number for _, number in run] for _, run in runs]
        spans = [f"{r[0]:0{width}}-{r[-1]:0{width}}" if len(r) > 1 else f"{r[0]:0{width}}" for r in ranges]
        parts.append(f"{prefix}[{','.join(spans)}]")
    return ",".join(parts)


PREFIXES = st.from_regex(r"[a-z]{1,6}(-[a-z]{1,3})?", fullmatch=True)
HOSTS = st.tuples(PREFIXES, st.from_regex(r"[0-9]{1,4}", fullmatch=True))


@given(st.lists(HOSTS, min_size=1, max_size=20))
@example([("node", "09"), ("node", "10"), ("node", "11"), ("gpu", "3")])
def test_hostlists_survive_the_round_trip(hosts):
    assert list(expand_hostlist(compress(hosts))) == [prefix + number for prefix, number in hosts]


@given(st.text(alphabet="ab0[]-, ", max_size=12))
def test_hostlist_parser_expands_or_refuses_any_text(text):
    try:
        names = [name for name, _ in zip(expand_hostlist(text), range(100), strict=False)]
    except ValueError:
        return
    assert names


@pytest.mark.real
def test_import_of_launchers_loads_neither_torch_nor_an_event_loop():
    code = (
        "import sys, aiocomms.bootstrap.launchers\n"
        "print(sorted({'torch', 'asyncio', 'anyio', 'trio', 'socket'} & sys.modules.keys()))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=HANGS)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


STARTER = """
import os, subprocess, sys

# As MPICH's mpiexec does: it starts both ranks of a host, one of them by way of a shell, and names no job.
read = "import os; from aiocomms.bootstrap.launchers import read_environment as r; print(r(os.environ).port)"
for rank, shell in enumerate([[], ["sh", "-c", '"$@"; exit $?', "sh"]]):
    env = os.environ | {"PMI_RANK": f"{rank}", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    subprocess.run([*shell, sys.executable, "-c", read], env=env, check=True)
"""


@pytest.mark.real
@pytest.mark.fault(93)
def test_ranks_started_by_one_local_process_derive_one_port():
    env = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    jobs = [
        subprocess.run([sys.executable, "-c", STARTER], env=env, check=True, text=True, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    (one, other), (third, fourth) = (job.stdout.split() for job in jobs)
    assert one == other
    assert third == fourth
    assert one != third


@pytest.mark.fault(93)
def test_rank_with_an_unknown_parent_process_needs_a_port(monkeypatch):
    """The first process of a container sees no parent process, so its rank must be given a port."""
    monkeypatch.setattr(os, "getppid", lambda: 0)
    with pytest.raises(ArgumentError, match="MASTER_PORT is missing"):
        read_environment(MPICH)
