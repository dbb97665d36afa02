"""The addresses at which the processes of a Ray job reach each other."""

from __future__ import annotations

import os

import ray

from aiocomms.errors import ArgumentError
from aiocomms.lowlevel import LOOPBACK, check_exposed
from aiocomms.lowlevel.auth import read_token

UNPROTECTED = (
    "for this job has no token: give the driver and all workers one, by AIOCOMMS_TOKEN in os.environ and in "
    "ray.init(runtime_env={'env_vars': {'AIOCOMMS_TOKEN': os.environ['AIOCOMMS_TOKEN']}})"
)
"""The end of an error message. It says why a process listens on the loopback interface, and what the user can do."""


def own_host() -> str:
    """Return the address at which other processes can reach this process.

    Return the loopback address if the job has no token and the environment does not allow jobs without a token.

    :raises ArgumentError: the token is invalid.
    """
    if read_token(os.environ) is None:
        try:
            check_exposed("a process of Ray can be reached from other nodes")
        except ArgumentError:
            return LOOPBACK
    return node()


def check_reachable(who: str, host: str, their_node: str) -> None:
    """Check that this process can reach another process.

    If the other process listens on the loopback interface, both processes must be on the same node.

    :param who: the name of the other process; the error's message begins with this name.
    :param host: the address at which the other process listens.
    :raises ArgumentError: the other process listens on the loopback interface of another node.
    """
    if host == LOOPBACK and their_node != node():
        raise ArgumentError(f"{who} is on node {their_node}, and this process on {node()}, {UNPROTECTED}")


def node() -> str:
    """Return the address of this process's node."""
    return str(ray.util.get_node_ip_address())
