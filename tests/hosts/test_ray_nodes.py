"""Several Ray nodes on one machine, as several raylets. No test here uses the network between two machines."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from test_ray_rendezvous import Actor, found, meet

pytestmark = pytest.mark.real

MIB = 2**20


@pytest.mark.parametrize("token", [True, False])
def test_two_nodes_of_one_machine(ray_folder: Path, token: bool, monkeypatch: pytest.MonkeyPatch):
    """The ranks meet at the node's address if there is a token, and on loopback if there is none."""
    monkeypatch.setattr(ray._private.utils, "write_ray_address", lambda *_: None)  # the function writes to /tmp/ray
    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": 80 * MIB,
            "temp_dir": str(ray_folder),
        },
    )
    try:
        nodes.add_node(num_cpus=1, object_store_memory=80 * MIB, temp_dir=str(ray_folder))
        variables = {"AIOCOMMS_TOKEN": secrets.token_hex(16)} if token else {}
        ray.init(address=nodes.address, runtime_env={"env_vars": variables}, logging_level="warning")
        two = [Actor.options(num_cpus=1).remote() for _ in range(2)]
        assert len(set(ray.get([actor.node.remote() for actor in two]))) == 2
        meet(two, "pipeline")
        assert ray.get([actor.sum.remote() for actor in two]) == [2.0, 2.0]
        assert found() == []
    finally:
        ray.shutdown()
        nodes.shutdown()
