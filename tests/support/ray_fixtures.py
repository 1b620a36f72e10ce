"""Ray on loopback, shared by all files that need it (tests/conftest.py), because its start takes half a minute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Ray's workers import plugins by their path.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])

NODE = {"num_cpus": 4, "object_store_memory": 80_000_000, "node_ip_address": "127.0.0.1"}


@pytest.fixture(scope="session")
def ray_head() -> Iterator[Any]:
    """Single-node ray.cluster_utils.Cluster on this machine, joined as a driver. A test may add nodes."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "include_log_monitor": False}
    )
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def ray_nodes(ray_head: Any) -> Any:
    """Three nodes with different values of the label `pool`: none, prefill and decode."""
    for pool in ("prefill", "decode"):
        ray_head.add_node(**NODE, labels={"pool": pool})
    return ray_head


@pytest.fixture(scope="session")
def three_nodes(ray_nodes: Any) -> str:
    """Address of the three nodes."""
    address: str = ray_nodes.address
    return address
