"""One Ray for the tests of this folder, on loopback, and deployments in it."""

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
# Before Ray is imported: they hold for this process and for every one that Ray starts.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # keeps 127.0.0.1 as the node's address
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join([str(_HERE.parents[1]), str(_HERE), os.environ.get("PYTHONPATH", "")])
sys.path.insert(0, str(_HERE))


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


class Deployment:
    """A controller with fake ranks, and what a test asks of it."""

    def __init__(self, log_dir: Path, spec: dict[str, Any], **parts: str) -> None:
        import ray

        from cluster.desired import Parts
        from cluster.driver import start_controller

        self.name = f"t{uuid.uuid4().hex[:8]}"
        self.log_dir = log_dir
        self.controller = start_controller(self.name)
        arguments = {"prefill": "fake_rank:FakeRank", "decode": "fake_rank:FakeRank"} | parts
        self.apply = lambda spec: ray.get(
            self.controller.apply.remote(
                {"name": self.name, **spec},
                index_url="redis://127.0.0.1:1",
                log_dir=str(log_dir),
                parts=Parts(**arguments),
            )
        )
        self.apply(spec)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        import ray

        return ray.get(getattr(self.controller, method).remote(*args, **kwargs), timeout=20)

    def pool(self, role: str) -> dict[str, Any]:
        return self.call("status")["pools"][role]

    def until(self, condition: Callable[[dict[str, Any]], Any], *, within_s: float = 20) -> dict[str, Any]:
        """The pools as soon as `condition(pools)` holds."""
        deadline = time.monotonic() + within_s
        while not condition(pools := self.call("status")["pools"]):
            assert time.monotonic() < deadline, f"not within {within_s} s: {pools}"
            time.sleep(0.05)
        return pools

    def until_ready(self, *, within_s: float = 20) -> dict[str, Any]:
        return self.until(
            lambda pools: all(pool["ready"] == pool["desired"] == len(pool["replicas"]) for pool in pools.values()),
            within_s=within_s,
        )

    def remove(self) -> None:
        import ray

        self.call("stop")
        ray.kill(self.controller)


@pytest.fixture
def deploy(local_ray: None, tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
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
