"""One Ray of three nodes, on loopback, for all tests of this folder, and deployments in it."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(_HERE.parents[1]), str(_HERE), os.environ.get("PYTHONPATH", "")])
sys.path.insert(0, str(_HERE))


NODE = {"num_cpus": 4, "object_store_memory": 80_000_000, "node_ip_address": "127.0.0.1"}


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[Any]:
    """A ray.cluster_utils.Cluster of three nodes on this machine, told apart by the label `pool`: none, prefill and
    decode. A test may add nodes of its own."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    for pool in ("prefill", "decode"):
        cluster.add_node(**NODE, labels={"pool": pool})
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
def three_nodes(ray_nodes: Any) -> str:
    """Their address."""
    address: str = ray_nodes.address
    return address


class Deployment:
    """A controller with fake ranks, and what a test asks of it."""

    def __init__(self, log_dir: Path, spec: dict[str, Any], **parts: str) -> None:
        from cluster.control.desired import Parts
        from cluster.host.driver import start_controller

        self.name = f"t{uuid.uuid4().hex[:8]}"
        self.log_dir = log_dir
        self.controller = start_controller(self.name)
        arguments = {"prefill": "fake_rank:FakeRank", "decode": "fake_rank:FakeRank"} | parts
        self._parts = Parts(**arguments)
        self.apply(spec)

    def apply(self, spec: dict[str, Any]) -> None:
        named = {"name": self.name, **spec}
        self.call("apply", named, index_url="redis://127.0.0.1:1", log_dir=str(self.log_dir), parts=self._parts)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        from cluster.host.driver import ask

        return ask(self.controller, method, *args, within_s=20, **kwargs)

    def pool(self, role: str) -> dict[str, Any]:
        return self.call("status")["pools"][role]

    def until(self, condition: Callable[[dict[str, Any]], Any], *, within_s: float = 40) -> dict[str, Any]:
        """The pools as soon as `condition(pools)` holds."""
        deadline = time.monotonic() + within_s
        while not condition(pools := self.call("status")["pools"]):
            assert time.monotonic() < deadline, f"not within {within_s} s: {pools}"
            time.sleep(0.05)
        return pools

    def until_ready(self, *, within_s: float = 40) -> dict[str, Any]:
        return self.until(
            lambda pools: all(pool["ready"] == pool["desired"] == len(pool["replicas"]) for pool in pools.values()),
            within_s=within_s,
        )

    def remove(self) -> None:
        import ray

        self.call("stop")
        ray.kill(self.controller)


@pytest.fixture
def deploy(three_nodes: str, tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """deploy(spec, prefill="fake_rank:slow_load", …) -> Deployment; taken down at the end."""
    made: list[Deployment] = []

    def make(spec: dict[str, Any], **parts: str) -> Deployment:
        made.append(Deployment(tmp_path, spec, **parts))
        return made[-1]

    yield make
    for deployment in made:
        deployment.remove()


def ids(pool: dict[str, Any]) -> list[str]:
    return [replica["id"] for replica in pool["replicas"]]
