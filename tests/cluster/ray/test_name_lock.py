"""Lock on a deployment's name in a Ray."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.control.gang import find_replicas
from cluster.launch import deployment as deploying
from cluster.launch import driver
from cluster.ray import name_lock
from cluster.ray.name_lock import NameLock
from core.types.errors import DeployError, NotDeployed
from tests.cluster.control.deploying import SMALL, Deployment
from tests.cluster.deployments import make_state

pytestmark = pytest.mark.filterwarnings("ignore")  # Serve's own pydantic warnings


@pytest.fixture
def remote(state_root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """cluster.launch.remote in a process that stays connected to Ray."""
    from cluster.launch import remote

    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return remote


def test_one_of_many_concurrent_deploys_gets_the_lock(three_nodes: str) -> None:
    name, locks = f"t{uuid.uuid4().hex[:8]}", [NameLock.new("ann") for _ in range(8)]

    def is_taken_by(lock: NameLock) -> bool:
        try:
            name_lock.take(name, lock)
        except DeployError as error:
            assert f"{name} is deployed on this Ray already, or is being deployed, by {lock}" == str(error)
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        [holder] = [lock for lock, is_its in zip(locks, threads.map(is_taken_by, locks), strict=True) if is_its]
    assert name_lock.find(name) == holder and name in name_lock.claimed()
    # As if Ray had sent the request twice.
    name_lock.take(name, holder)
    name_lock.give_up(name)
    assert name_lock.find(name) is None and name not in name_lock.claimed()


def test_stale_state_does_not_take_down_another_deployment(three_nodes: str, remote: Any, tmp_path: Path) -> None:
    """This machine's state is stale: its deployment ended with its Ray, and another one has the name since."""
    deployment, lock = Deployment(tmp_path / "logs", SMALL), NameLock.new("ann")
    name_lock.take(deployment.name, lock)
    deployment.until_ready()
    # Empty: written by a version without locks.
    for stale in ("0123456789abcdef", ""):
        for force in (False, True):
            state = make_state(deployment.name, ray_address=three_nodes, claim=stale)
            assert deploying.take_down(state, force=force) == lock
    assert len(find_replicas(deployment.name)) == 2 and deployment.call("status")
    found = remote.find_any(three_nodes, deployment.name)
    assert deploying.take_down(found) is None
    assert not find_replicas(deployment.name) and driver.find_controller(deployment.name) is None
    assert name_lock.find(deployment.name) is None


def test_interrupted_deployment_is_removed_from_any_machine(three_nodes: str, remote: Any) -> None:
    name = f"t{uuid.uuid4().hex[:8]}"
    name_lock.take(name, NameLock.new("ann"))
    with pytest.raises(DeployError, match=f"{name}: no controller on Ray at .* removes what is left of it"):
        remote.find(three_nodes, name)
    assert deploying.take_down(remote.find_any(three_nodes, name)) is None
    with pytest.raises(NotDeployed):
        remote.find_any(three_nodes, name)
