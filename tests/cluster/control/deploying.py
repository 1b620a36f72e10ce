"""Deployments on a Ray of three nodes, with ranks without a model."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.rollout.spec_diff import updated
from cluster.rollout.update import UpdateOptions
from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.types.launch import Launch
from tests.cluster.control import fake_rank
from tests.support.waiting import WITHIN_S, until

# One replica of each role.
SMALL = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        # It has ended, or ended while it was read.
        return False


class Deployment:
    """Controller with fake ranks, and helpers for tests."""

    def __init__(
        self, log_dir: Path, spec: dict[str, Any], *, index_url: str = "redis://127.0.0.1:1", **parts: str
    ) -> None:
        from cluster.control.desired_state import Parts
        from cluster.launch.driver import start_controller

        self.credentials = DeploymentSecrets.new(index_url=index_url)
        self.name = f"t{uuid.uuid4().hex[:8]}"
        self.log_dir = log_dir
        self.controller = start_controller(self.name)
        ranks = {"prefill": "FakeRank", "decode": "FakeRank"} | parts
        launch = Launch(
            spec=parse_spec({"name": self.name, **spec}), log_dir=str(log_dir), credentials=self.credentials
        )
        self.call(
            "apply", launch, parts=Parts(**{role: f"{fake_rank.__name__}:{name}" for role, name in ranks.items()})
        )

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        from cluster.launch.driver import ask

        return ask(self.controller, method, *args, within_s=WITHIN_S, **kwargs)

    def pool(self, role: str) -> dict[str, Any]:
        return self.call("status")["pools"][role]

    def until(self, condition: Callable[[dict[str, Any]], Any], *, within_s: float = WITHIN_S) -> dict[str, Any]:
        """Wait until `condition(pools)` holds. Returns the pools."""
        pools: dict[str, Any] = {}

        def holds() -> Any:
            pools.update(self.call("status")["pools"])
            return condition(pools)

        try:
            # Each look is a call, which competes for the cores with what it waits for.
            until(holds, within_s=within_s, look_s=0.1)
        except AssertionError:
            raise AssertionError(f"it never came to that; the pools: {pools}") from None
        return pools

    def update(self, named: dict[str, Any], **options: Any) -> bool:
        """Begin an update of the named keys. Returns False if it replaces no replica."""
        new = updated(parse_spec(self.call("status")["spec"]), named, is_whole=False).model_dump(mode="json")
        is_begun: bool = self.call("update", new, UpdateOptions(**options))
        return is_begun

    def until_ready(self) -> dict[str, Any]:
        return self.until(is_settled)

    def restart(self) -> None:
        """Kill the controller and use its restarted actor from now on.

        Waits for the old process to end: until then, a call may still reach it and be repeated.
        """
        import ray

        pid = ray.get(self.controller.__ray_call__.remote(lambda _: os.getpid()), timeout=WITHIN_S)
        ray.kill(self.controller, no_restart=False)
        until(lambda: not is_alive(pid))

    def remove(self) -> None:
        import ray

        self.call("stop")
        ray.kill(self.controller)


@pytest.fixture
def deploy(three_nodes: str, tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """deploy(spec, prefill="slow_load", index_url=…) -> Deployment, taken down at the end."""
    made: list[Deployment] = []

    def make(spec: dict[str, Any], **more: str) -> Deployment:
        made.append(Deployment(tmp_path / "logs", spec, **more))
        return made[-1]

    yield make
    for deployment in made:
        deployment.remove()


Deploy = Callable[..., Deployment]


def is_settled(pools: dict[str, Any]) -> bool:
    return all(pool["ready"] == pool["desired"] == len(pool["replicas"]) for pool in pools.values())


def ids(pool: dict[str, Any]) -> list[str]:
    return [replica["id"] for replica in pool["replicas"]]
