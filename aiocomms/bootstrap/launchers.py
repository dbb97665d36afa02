"""The environment variables of launchers, in which a process finds its rank, the number of ranks and the store.

This module imports neither torch nor an event loop, and opens no socket. The module supports Open MPI, MPICH and its
relatives (Intel MPI, PALS), Slurm's srun, torchrun, and other launchers that set the variables of torch's ``env://``.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import zlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiocomms.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Launch", "expand_hostlist", "read_environment"]

_log = logging.getLogger("aiocomms")

# Only a process that the launcher has started as a rank has these variables.
_MARKS: Final = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")),
    "MPICH": (
        *("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PMI_FD", "PMI_PORT", "PMI_ID"),
        *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PALS_RANKID"),
    ),
    "PMIx": ("PMIX_RANK",),
    "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST"),
}
_SHARED: Final = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS")

# Linux assigns source ports from 32768 on (net.ipv4.ip_local_port_range), so these ports are lower. Any outgoing
# connection of the host may hold a source port. A rank that connects to one before rank 0 listens there may even be
# connected to itself.
_PORTS: Final = range(20000, 32000)

# Step numbers from here on are special: a batch script, or the shell of an interactive allocation (slurm.h).
_SLURM_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0

_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launch:
    """The rank of this process in its job, and the address of the job's store, both set by the launcher.

    :param launcher: ``"torchrun"``, ``"Open MPI"``, ``"MPICH"`` or ``"Slurm"``.
    :param rank: the rank of this process, ``0 <= rank < size``.
    :param size: the number of processes.
    :param host: the name or address of the store's host, where rank 0 runs; None only if ``size`` is 1.
    :param port: the TCP port of the store, 1 to 65535; None only if ``size`` is 1.
    :param agent_store: whether the launcher itself serves the store, so that rank 0 must not serve it.
    :param elsewhere: whether the launcher, and not ``MASTER_ADDR``, has named ``host``. Then ranks may be on other
        hosts.
    """

    launcher: str
    rank: int
    size: int
    host: str | None
    port: int | None
    agent_store: bool
    elsewhere: bool = False


def read_environment(environ: Mapping[str, str]) -> Launch | None:
    """Return the launcher of this process, its rank and the number of ranks.

    The function takes the first launcher that applies: torchrun, Open MPI, MPICH, Slurm. ``MASTER_ADDR`` and
    ``MASTER_PORT`` take precedence over the launcher's host and port. An empty variable counts as missing.

    :param environ: the environment, such as ``os.environ``.
    :returns: the rank of this process and the address of the store; None if no launcher started this process. A process
        without a launcher is the only rank, and the function logs that.
    :raises ArgumentError: the environment is incomplete or contradicts itself. The message lists all faults, and the
        launcher's variables that are set.
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
    # Job scripts export WORLD_SIZE for srun's tasks too, so it counts alone only if no other launcher applies.
    for launcher, read in _READERS.items():
        if any(name in env for name in _MARKS[launcher]) and not (launcher == "Slurm" and _is_slurm_shell(env)):
            return read(env)
    if env.get("SLURM_PROCID", "0") != "0" and not _is_slurm_shell(env):
        return _read_slurm(env)
    _log_world_of_one(env)
    return None


def _log_world_of_one(env: Mapping[str, str]) -> None:
    """Log that this process is the only rank.

    The record is a warning if a variable suggests that there are several ranks.
    """
    hints = [name for name in ("MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX") if name in env]
    if "SLURM_JOB_ID" in env and env.get("SLURM_NTASKS", "1") != "1":
        hints += [name for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID") if name in env]
    there = f", although there are {', '.join(f'{name}={env[name]}' for name in hints)}" if hints else ""
    _log.log(
        logging.WARNING if hints else logging.INFO, "no launcher gives a rank%s: this process is a world of one", there
    )


def expand_hostlist(text: str) -> Iterator[str]:
    """Expand a list of hosts in Slurm's notation, as ``scontrol show hostnames`` does.

    :param text: a list such as ``"node[01-03,07],gpu3"``; a name may contain several pairs of brackets.
    :returns: an iterator over the names in order: ``node01``, ``node02``, ``node03``, ``node07``, ``gpu3``.
    :raises ValueError: the text is no list in this notation.
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
    """A reader of one launcher's variables. The reader collects complaints, so that one error lists all of them."""

    def __init__(self, launcher: str, env: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.env = env
        self.complaints: list[str] = []

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """Return the value of an integer variable.

        If the variable is missing, or its value is wrong, add a complaint and return None.
        """
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
        elif host is not None and not _is_host(host):
            self.complaints.append(f"MASTER_ADDR is {host!r}, wanted a name or an IP address, without port or brackets")
        port = self.port(job, size)
        if self.complaints or rank is None or size is None:
            raise self.error()
        elsewhere = host not in (None, _LOOPBACK, self.env.get("MASTER_ADDR"))
        return Launch(self.launcher, rank, size, host, port, agent_store, elsewhere)

    def error(self) -> ArgumentError:
        """Return the error with all complaints.

        If a variable is missing, the error also lists the variables that are set.
        """
        there = ""
        if any("is missing" in complaint for complaint in self.complaints):
            names = [name for name in (*_MARKS[self.launcher], *_SHARED) if name in self.env]
            there = f"; there are {', '.join(names)}"
        complaints = "; ".join(self.complaints)
        return ArgumentError(f"the environment of {self.launcher} is not complete: {complaints}{there}")

    def port(self, job: str | None, size: int | None) -> int | None:
        """Return ``MASTER_PORT``.

        If the variable is missing, return a port that every rank computes from the job's id.
        """
        if "MASTER_PORT" in self.env:
            return self.integer("MASTER_PORT", 1, 65535)
        if job is not None:
            return _PORTS[zlib.crc32(job.encode(errors="surrogateescape")) % len(_PORTS)]
        if size != 1:
            self.complaints.append("MASTER_PORT is missing (a free port there, the same on every rank)")
        return None


def _is_host(text: str) -> bool:
    """Return whether a text can name a host.

    For any other text, the look-up of the address would last until the deadline.
    """
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return re.search(r"[^\w.-]", text) is None
    return True


def _read_torchrun(env: Mapping[str, str]) -> Launch:
    reader = _Reader("torchrun", env)
    rank, size = reader.rank_and_size("RANK", "WORLD_SIZE")
    # Each agent counts TORCHELASTIC_RESTART_COUNT by itself, so the count must not become part of a key.
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return reader.launch(rank, size, env.get("MASTER_ADDR"), None, agent_store=agent_store)


def _read_open_mpi(env: Mapping[str, str]) -> Launch:
    reader = _Reader("Open MPI", env)
    rank, size = reader.rank_and_size("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    host = _first_host(reader, size, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    return reader.launch(rank, size, host, job)


def _read_mpich(env: Mapping[str, str]) -> Launch:
    reader = _Reader("MPICH", env)
    rank, size = reader.rank_and_size("PMI_RANK", "PMI_SIZE")
    local = "MPI_LOCALNRANKS" if "MPI_LOCALNRANKS" in env else "PMI_LOCAL_SIZE"
    host = _first_host(reader, size, local)
    # MPICH's mpiexec puts no id of the job into the environment. If it runs in a Slurm step, the step's id serves.
    ids = ("PALS_APID", "I_MPI_HYDRA_UUID", "PMI_JOBID")
    job = next((env[name] for name in ids if name in env), None) or _slurm_step(env)
    if job is None and "MASTER_PORT" not in env and host == _LOOPBACK:
        job = _starter("PMI_RANK")
    return reader.launch(rank, size, host, job)


def _starter(mark: str) -> str | None:
    """Return the pid and start time of the process that started all ranks of this host; None if it is unknown.

    That process is the nearest ancestor of this process without the variable that marks a rank. Between that process
    and a rank there may be a shell, or a tool that binds the rank to its cores.
    """
    pid = os.getppid()
    try:
        while pid:
            _, _, stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
            parent, start = (stat.split()[place] for place in (1, 19))  # See proc_pid_stat(5) for ppid and starttime.
            marks = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(it.startswith(f"{mark}=".encode()) for it in marks):
                return f"{pid}.{start}"
            pid = int(parent)
    except OSError:  # The process of another user has not started this one.
        pass
    return None


def _read_pmix(env: Mapping[str, str]) -> Launch:
    # PMIx gives a process its rank in the environment, but the number of ranks only by its library.
    reader = _Reader("PMIx", env)
    rank, size = reader.rank_and_size("RANK", "WORLD_SIZE")
    return reader.launch(rank, size, env.get("MASTER_ADDR"), None)


def _first_host(reader: _Reader, size: int | None, local_name: str) -> str | None:
    """Return the host of rank 0: ``MASTER_ADDR``, or else the loopback address if all ranks are on this host.

    For several hosts of a Slurm job, return the job's first host, where mpiexec places rank 0 by default. If no host is
    known, return None. If rank 0 runs on a host other than the returned host, rank 0 raises an error, because it cannot
    serve the store there.
    """
    host = reader.env.get("MASTER_ADDR")
    if host is not None or size is None or local_name not in reader.env:
        return host
    if reader.integer(local_name, 1, size) == size:
        return _LOOPBACK
    return _first_slurm_host(reader, "SLURM_JOB_NODELIST")


def _read_slurm(env: Mapping[str, str]) -> Launch:
    reader = _Reader("Slurm", env)
    if _slurm_step(env) is None:
        reader.complaints.append("SLURM_STEP_ID is missing (srun sets it: a job's variables alone make no rank)")
    rank, size = reader.rank_and_size("SLURM_PROCID", _slurm_size_name(env))
    host = env.get("MASTER_ADDR") or _first_slurm_host(reader, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    return reader.launch(rank, size, host, _slurm_step(env))


def _first_slurm_host(reader: _Reader, *names: str) -> str | None:
    for name in names:
        if name not in reader.env:
            continue
        try:
            hosts = list(islice(expand_hostlist(reader.env[name]), 2))
        except ValueError as error:
            reader.complaints.append(f"{name} is {reader.env[name]!r}, wanted hosts as node[01-04],gpu3 ({error})")
            return None
        # On a single host the loopback address is enough for the store.
        return hosts[0] if len(hosts) > 1 else _LOOPBACK
    return None


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one task of a step.

    The shells of sbatch and salloc also have ``SLURM_JOB_ID``. A batch shell also has ``SLURM_PROCID=0`` and the
    requested ``SLURM_NTASKS``. If the batch shell counted as a task, it would wait for ranks that are never started.
    But a batch shell does not belong to a step, and the shell of an interactive allocation is a special step.
    """
    return "SLURM_PROCID" in env and _slurm_step(env) is not None


def _is_slurm_shell(env: Mapping[str, str]) -> bool:
    """Return whether this process is the shell of an interactive allocation: a special step with one task."""
    return "SLURM_STEP_ID" in env and _slurm_step(env) is None


def _slurm_step(env: Mapping[str, str]) -> str | None:
    """Return ``"job.step"`` of the ordinary step to which this process belongs, or None."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    if not re.fullmatch(r"[0-9]{1,18}", step) or int(step) >= _SLURM_FIRST_SPECIAL_STEP:
        return None
    return f"{env.get('SLURM_JOB_ID', '')}.{step}"


def _slurm_size_name(env: Mapping[str, str]) -> str:
    # `srun --preserve-env` keeps the allocation's SLURM_NTASKS. SLURM_STEP_NUM_TASKS always counts the step's tasks.
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _is_pmi_of_slurm(env: Mapping[str, str]) -> bool:
    """Return whether srun and PMI agree on this process's rank and the number of ranks.

    If both agree, srun started the ranks and serves PMI to them (``--mpi=pmi2``). Otherwise srun started mpiexec's
    proxies, and ``SLURM_PROCID`` is the number of a proxy.
    """
    slurm = (env.get("SLURM_PROCID"), env.get(_slurm_size_name(env)))
    return slurm == (env.get("PMI_RANK"), env.get("PMI_SIZE"))


_READERS: Final = {
    "torchrun": _read_torchrun,
    "Open MPI": _read_open_mpi,
    "MPICH": _read_mpich,
    "PMIx": _read_pmix,
    "Slurm": _read_slurm,
}
