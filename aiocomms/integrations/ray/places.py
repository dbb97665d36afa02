"""The addresses at which processes of Ray are reached by others of their job."""

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
"""The reason why a process listens on loopback, and the cure."""


def own_host() -> str:
    """Return the address of this process's node at which other nodes reach it; loopback, where the job has no token.

    :raises ArgumentError: the token is not as it must be.
    """
    if read_token(os.environ) is None:
        try:
            check_exposed("a process of Ray can be reached from other nodes")
        except ArgumentError:
            return LOOPBACK
    return node()


def check_reachable(who: str, host: str, their_node: str) -> None:
    """Check that who listens on loopback is on this process's node.

    :param who: the beginning of the error's message.
    :param host: where it listens.
    :raises ArgumentError: it is not.
    """
    if host == LOOPBACK and their_node != node():
        raise ArgumentError(f"{who} is on node {their_node}, and this process on {node()}, {UNPROTECTED}")


def node() -> str:
    """Return the address of this process's node."""
    return str(ray.util.get_node_ip_address())
