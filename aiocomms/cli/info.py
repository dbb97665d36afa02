"""The command ``aiocomms info``: versions, transports, devices, interfaces and environment variables."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator

import torch

import aiocomms
from aiocomms.bootstrap.registry import available, entries, info
from aiocomms.diagnosis.dumps import wanted
from aiocomms.diagnosis.recorder import capacity

_LIBRARIES = ("msgspec", "anyio", "uvloop", "trio", "numpy")
_PREFIXES = (
    "AIOCOMMS_", "MASTER_", "TORCHELASTIC_USE_AGENT_STORE", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCALNRANKS",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_", "SLURM_JOB_NODELIST",
)  # fmt: skip
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "XDG_RUNTIME_DIR")
_SECRETS = ("TOKEN", "SECRET", "KEY", "PASS")


def run(*, as_json: bool) -> int:
    """Print all sections: the versions, the transports, the devices, and so on.

    :param as_json: whether to print one JSON object, in which each section is an object.
    """
    parts = (_versions, _transports, _devices, _interfaces, _environment, _next)
    sections = {part.__name__.removeprefix("_"): dict(part()) for part in parts}
    if as_json:
        print(json.dumps(sections, indent=2))
        return 0
    for title, rows in sections.items():
        print(f"{title}:")
        for name, value in rows.items():
            print(f"  {name:28} {value}")
    return 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "aiocomms", f"{aiocomms.__version__} in {os.path.dirname(aiocomms.__file__)}"  # noqa: PTH120
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    yield "torch", torch.__version__
    for name in _LIBRARIES:
        yield name, importlib.metadata.version(name) if _is_installed(name) else "not installed"


def _transports() -> Iterator[tuple[str, str]]:
    for device in ("cpu", "cuda"):
        for name, why in available(torch.device(device)).items():
            distribution = entries()[name].dist
            version = f" ({distribution.name} {distribution.version})" if distribution is not None else ""
            yield f"{name} on {device}", f"available{version}" if why is None else f"not available: {why}"
    for name, facts in info(torch.device("cpu")).items():
        yield from ((f"{name}, {what}", value) for what, value in facts.items())


def _devices() -> Iterator[tuple[str, str]]:
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield "cpu", f"{usable} of {os.cpu_count()} processors, {torch.get_num_threads()} threads of torch"
    if not torch.cuda.is_available():
        yield "cuda", "none"
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB"


def _interfaces() -> Iterator[tuple[str, str]]:
    yield "host", socket.gethostname()
    for _, name in socket.if_nameindex():
        yield name, "loopback" if name == "lo" else "may be named in AIOCOMMS_IFACE"


def _environment() -> Iterator[tuple[str, str]]:
    for name, value in sorted(os.environ.items()):
        if name in _NAMES or name.startswith(_PREFIXES):
            secret = any(word in name for word in _SECRETS)
            yield name, "set, and not shown" if secret else ascii(value[:200])
    yield "flight recorder", f"{capacity()} operations; files are {'' if wanted() else 'not '}written"


def _next() -> Iterator[tuple[str, str]]:
    """Yield the advice for the user: what to install on this machine, or how to begin."""
    for requirement in importlib.metadata.requires("aiocomms") or ():
        name, extra = re.match(r"([\w-]+).*?(?:extra == '([\w-]+)')?$", requirement).groups()  # type: ignore[union-attr]
        if extra and name.startswith("aiocomms-") and not _is_installed(name):
            yield "install", f"pip install 'aiocomms[{extra}]'"
            return
    reasons = available(torch.device("cuda"))
    lacks = [why for why in reasons.values() if why is not None and "pip install" in why]
    if torch.cuda.is_available() and lacks:
        yield "install", lacks[0]
    else:
        yield "try", "aiocomms bench"


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
