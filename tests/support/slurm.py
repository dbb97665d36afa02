"""A cluster of Slurm whose nodes are network namespaces of this machine, from the daemons that Debian has."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hosts import address, hosts, inside
from processes import HANGS

NEEDS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "unshare")
INSTALL = "apt-get install --no-install-recommends munge slurmctld slurmd slurm-client iproute2"
NODES = ("node1", "node2")
_LOGIN = "login"

_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={login}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
KillWait=1
NodeName={nodes} CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """One login node, where the controller runs, and the nodes."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._hosts = dict(zip((_LOGIN, *NODES), names, strict=True))
        self._daemons: list[subprocess.Popen[bytes]] = []

    def on(self, host: str, *command: str) -> list[str]:
        """A command with the host's network, name and processes; those end when it does."""
        return inside(self._hosts[host], host, self._folder / "hosts", *command)

    def login(self, *command: str) -> list[str]:
        """A command on the login node."""
        return self.on(_LOGIN, *command)

    @property
    def variables(self) -> Mapping[str, str]:
        """Return the variables that a user's shell there has set."""
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes take jobs."""
        addresses = [f"{address(number)} {host}\n" for number, host in enumerate(self._hosts)]
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(addresses))
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        configuration = _CONFIGURATION.format(login=_LOGIN, folder=self._folder, nodes=",".join(NODES))
        (self._folder / "slurm.conf").write_text(configuration)
        files = [f"--{it}-file={self._folder}/munge.{it}" for it in ("key", "pid", "log", "seed")]
        self._daemon("munged", ["munged", "--foreground", "--force", f"--socket={self._folder}/munge.socket", *files])
        self._await("munge.socket", lambda: (self._folder / "munge.socket").exists())
        self._daemon("slurmctld", self.login("slurmctld", "-D"))
        for node in NODES:
            self._daemon(f"slurmd.{node}", self.on(node, "slurmd", "-D", "-N", node))
        self._await("idle nodes", self._idle)

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.output").open("wb") as output:
            daemon = subprocess.Popen(command, env=os.environ | self.variables, stdout=output, stderr=output)
        self._daemons.append(daemon)

    def _idle(self) -> bool:
        command = self.login("sinfo", "--noheader", "--format=%T %D")
        done = subprocess.run(
            command, env=os.environ | self.variables, capture_output=True, text=True, timeout=HANGS, check=False
        )
        return done.stdout.strip() == f"idle {len(NODES)}"

    def _await(self, what: str, there: Callable[[], bool]) -> None:
        ends = time.monotonic() + HANGS
        while not there():
            dead = [shlex.join(it.args) for it in self._daemons if it.poll() is not None]
            assert not dead, f"{dead} ended\n{self.outputs()}"
            assert time.monotonic() < ends, f"no {what}\n{self.outputs()}"
            time.sleep(0.05)

    def outputs(self) -> str:
        """Return the daemons' outputs."""
        return "\n".join(f"{it.name}:\n{it.read_text()[-3000:]}" for it in sorted(self._folder.glob("*.output")))

    def stop(self) -> None:
        """End the daemons, and with them every job."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start one; skips the test where that cannot be."""
    missing = [command for command in NEEDS if not shutil.which(command)]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: {INSTALL}")
    with hosts(1 + len(NODES)) as names:
        made = Cluster(folder, names)
        try:
            made.start()
            yield made
        finally:
            made.stop()
