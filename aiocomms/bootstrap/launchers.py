"""What a launcher's environment says of this process: its rank, the number of ranks and where they meet.

Pure and light: it imports neither torch nor an event loop and opens no socket. Supported are torchrun and whatever
else sets the variables of torch's ``env://``, Open MPI, MPICH and its relatives (Intel MPI, PALS), and Slurm's srun.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from aiocomms.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Launch", "expand_hostlist", "read_environment"]

# Below 32768, where Linux begins to hand out source ports (net.ipv4.ip_local_port_range): any outgoing connection of
# the host may hold a port from there, and a rank that knocks before rank 0 listens may even be connected to itself.
_PORTS: Final = range(20000, 32000)

# Steps from here on are Slurm's own: a batch script, the shell of an interactive allocation (slurm.h).
_SLURM_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0

_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started.

    :param launcher: ``"torchrun"``, ``"Open MPI"``, ``"MPICH"`` or ``"Slurm"``.
    :param rank: this process, ``0 <= rank < size``.
    :param size: the number of processes.
    :param host: the name or address on which rank 0 is met; None only if ``size`` is 1.
    :param port: the TCP port there, 1 to 65535; None only if ``size`` is 1.
    :param agent_store: the launcher itself serves the store there, so that rank 0 must not.
    """

    launcher: str
    rank: int
    size: int
    host: str | None
    port: int | None
    agent_store: bool


def read_environment(environ: Mapping[str, str]) -> Launch | None:
    """Find out which launcher started this process, and as which of how many ranks.

    The first that applies is taken: torchrun, Open MPI, MPICH, Slurm. ``MASTER_ADDR`` and ``MASTER_PORT`` win over
    what the launcher implies. An empty variable counts as missing.

    :param environ: the environment, as ``os.environ``.
    :returns: the launch, or None if no launcher started this process: it is a world of one.
    :raises ArgumentError: the environment is incomplete or contradicts itself; the message lists all that is wrong.
    """
    env = {name: value.strip() for name, value in environ.items() if value.strip()}
    if "RANK" in env:
        return _read_torchrun(env)
    if "OMPI_COMM_WORLD_RANK" in env or "OMPI_COMM_WORLD_SIZE" in env:
        return _read_open_mpi(env)
    slurm = _is_slurm_task(env)
    if ("PMI_RANK" in env or "PMI_SIZE" in env) and not (slurm and _is_pmi_of_slurm(env)):
        return _read_mpich(env)
    if slurm:
        return _read_slurm(env)
    # Job scripts export WORLD_SIZE for srun's tasks too, so that alone it says something only where nobody else does.
    return _read_torchrun(env) if "WORLD_SIZE" in env else None


def expand_hostlist(text: str) -> Iterator[str]:
    """Spell out a list of hosts in Slurm's notation, as ``scontrol show hostnames`` does.

    :param text: such as ``"node[01-03,07],gpu3"``; a name may hold several brackets.
    :returns: the names in order, made one by one: ``node01``, ``node02``, ``node03``, ``node07``, ``gpu3``.
    :raises ValueError: the text is not such a list.
    """
    for name in re.split(r",(?![^\[]*\])", text):
        if not name:
            raise ValueError(f"an empty name in {text!r}")
        yield from _expand_name(name)


def _expand_name(name: str) -> Iterator[str]:
    head, bracket, rest = name.partition("[")
    inside, closed, tail = rest.partition("]")
    if re.search(r"[^\w.-]", head) or bool(bracket) != bool(closed):
        raise ValueError(f"unexpected brackets or characters in {name!r}")
    if not bracket:
        yield head
        return
    for number in _expand_numbers(inside):
        for suffix in _expand_name(tail):
            yield head + number + suffix


def _expand_numbers(inside: str) -> Iterator[str]:
    for item in inside.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{item!r} is no number and no ascending range")
        low, high = match[1], match[2] or match[1]
        for number in range(int(low), int(high) + 1):
            yield f"{number:0{len(low)}}"


class _Reader:
    """Reads one launcher's variables and gathers complaints, so that the user sees all of them at once."""

    def __init__(self, launcher: str, env: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.env = env
        self.complaints: list[str] = []

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """The variable's value; None, with a complaint, if it is missing or out of bounds."""
        text = self.env.get(name)
        if text is None:
            self.complaints.append(f"{name} is missing")
            return None
        value = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
        if value is None or value < low or (high is not None and value > high):
            bounds = f">= {low}" if high is None else f"in {low}..{high}"
            self.complaints.append(f"{name} is {text!r}, wanted an integer {bounds}")
            return None
        return value

    def rank_and_size(self, rank_name: str, size_name: str) -> tuple[int | None, int | None]:
        rank, size = self.integer(rank_name, 0), self.integer(size_name, 1)
        if rank is not None and size is not None and rank >= size:
            self.complaints.append(f"{rank_name} is {rank}, wanted 0 <= {rank_name} < {size_name}={size}")
        return rank, size

    def launch(
        self, rank: int | None, size: int | None, host: str | None, job: str | None, *, agent_store: bool = False
    ) -> Launch:
        if host is None and size != 1:
            self.complaints.append("MASTER_ADDR is missing (the host on which rank 0 runs)")
        port = self.port(job, size)
        if self.complaints or rank is None or size is None:
            complaints = "; ".join(self.complaints)
            raise ArgumentError(f"launched by {self.launcher}, but the environment is not complete: {complaints}")
        return Launch(self.launcher, rank, size, host, port, agent_store)

    def port(self, job: str | None, size: int | None) -> int | None:
        """``MASTER_PORT``, or else a port that every rank derives alike from the job's id."""
        if "MASTER_PORT" in self.env:
            return self.integer("MASTER_PORT", 1, 65535)
        if job is not None:
            return _PORTS[zlib.crc32(job.encode(errors="surrogateescape")) % len(_PORTS)]
        if size != 1:
            self.complaints.append("MASTER_PORT is missing (a free port there, the same on every rank)")
        return None


def _read_torchrun(env: Mapping[str, str]) -> Launch:
    reader = _Reader("torchrun", env)
    rank, size = reader.rank_and_size("RANK", "WORLD_SIZE")
    # Agents count TORCHELASTIC_RESTART_COUNT each for itself, so that it must not become part of a key.
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return reader.launch(rank, size, env.get("MASTER_ADDR"), None, agent_store=agent_store)


def _read_open_mpi(env: Mapping[str, str]) -> Launch:
    reader = _Reader("Open MPI", env)
    rank, size = reader.rank_and_size("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    host = _one_host(reader, size, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    return reader.launch(rank, size, host, job)


def _read_mpich(env: Mapping[str, str]) -> Launch:
    reader = _Reader("MPICH", env)
    rank, size = reader.rank_and_size("PMI_RANK", "PMI_SIZE")
    local = "MPI_LOCALNRANKS" if "MPI_LOCALNRANKS" in env else "PMI_LOCAL_SIZE"
    host = _one_host(reader, size, local)
    # MPICH's own mpiexec puts no id of the job into the environment, but a Slurm step that it runs in will do.
    ids = ("PALS_APID", "I_MPI_HYDRA_UUID", "PMI_JOBID")
    job = next((env[name] for name in ids if name in env), None) or _slurm_step(env)
    return reader.launch(rank, size, host, job)


def _one_host(reader: _Reader, size: int | None, local_name: str) -> str | None:
    """``MASTER_ADDR``, or the loopback address if all ranks are on this host."""
    host = reader.env.get("MASTER_ADDR")
    if host is not None or size is None or local_name not in reader.env:
        return host
    return _LOOPBACK if reader.integer(local_name, 1, size) == size else None


def _read_slurm(env: Mapping[str, str]) -> Launch:
    reader = _Reader("Slurm", env)
    rank, size = reader.rank_and_size("SLURM_PROCID", _slurm_size_name(env))
    host = env.get("MASTER_ADDR") or _first_slurm_host(reader)
    return reader.launch(rank, size, host, _slurm_step(env))


def _first_slurm_host(reader: _Reader) -> str | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if name not in reader.env:
            continue
        try:
            hosts = list(islice(expand_hostlist(reader.env[name]), 2))
        except ValueError as error:
            reader.complaints.append(f"{name} is {reader.env[name]!r}, wanted hosts as node[01-04],gpu3 ({error})")
            return None
        # On one host nobody from outside need reach the store.
        return hosts[0] if len(hosts) > 1 else _LOOPBACK
    return None


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process, as one of a step's tasks.

    ``SLURM_JOB_ID`` stands in the shells of sbatch and salloc too, and a batch shell even has ``SLURM_PROCID=0`` and
    the ``SLURM_NTASKS`` that was asked for: it would wait for ranks that nobody starts. But it is no step, and the
    shell of an interactive allocation is a special one.
    """
    return "SLURM_PROCID" in env and _slurm_step(env) is not None


def _slurm_step(env: Mapping[str, str]) -> str | None:
    """``"job.step"`` of the ordinary step that this process belongs to."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    if not re.fullmatch(r"[0-9]{1,18}", step) or int(step) >= _SLURM_FIRST_SPECIAL_STEP:
        return None
    return f"{env.get('SLURM_JOB_ID', '')}.{step}"


def _slurm_size_name(env: Mapping[str, str]) -> str:
    # `srun --preserve-env` leaves SLURM_NTASKS as the allocation set it; the step's own count is always the step's.
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _is_pmi_of_slurm(env: Mapping[str, str]) -> bool:
    """Whether srun and PMI agree on this process.

    If so, srun started the ranks and speaks PMI to them (``--mpi=pmi2``). If they do not, srun started mpiexec's
    proxies, and ``SLURM_PROCID`` counts those.
    """
    slurm = (env.get("SLURM_PROCID"), env.get(_slurm_size_name(env)))
    return slurm == (env.get("PMI_RANK"), env.get("PMI_SIZE"))
