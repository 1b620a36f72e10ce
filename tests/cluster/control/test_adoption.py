"""Controller restarted by Ray while Ray itself is coming back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ray.exceptions import RpcError

from cluster.control import controller, replica_lifecycle
from cluster.control.controller import Controller
from cluster.control.desired_state import Desired
from cluster.control.replica import ReplicaState, ReplicaStatus, role_of
from cluster.ray import internals
from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.types.errors import DeployError, RankUnreachable
from core.types.launch import Launch


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_lifecycle, "_TRY_AGAIN_S", 0.02)


async def test_adoption_retries_until_ray_lists_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | Exception] = [RpcError("the control store is away"), ["decode-3"], []]
    removed: list[str] = []

    def find_replicas(name: str) -> list[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    for function in ("put", "get", "delete"):
        monkeypatch.setattr(internals, function, lambda *key, namespace: None)
    for module in (replica_lifecycle, controller):
        monkeypatch.setattr(module, "find_replicas", find_replicas)
    monkeypatch.setattr(replica_lifecycle, "remove_leftovers", lambda replica, name: removed.append(replica))
    starting = Controller.__new__(Controller)
    await starting.__init__("a")  # type: ignore[misc,func-returns-value]
    with pytest.raises(DeployError, match="nothing has been deployed yet"):
        await starting.status()
    assert removed == ["decode-3"], "it was found, but is not desired"
    await starting.stop()
    assert not answers


async def test_temporarily_unreachable_replica_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts do not come back all at once when the controller's host has rebooted."""
    removed: list[str] = []

    class Timeline:
        home = serving_since = None
        num_tries = 0

        def __init__(self, replica: str, desired: Desired) -> None:
            self.view = ReplicaStatus(id=replica, role=role_of(replica))

        async def adopt(self) -> None:
            self.num_tries += 1
            if self.num_tries == 1:
                raise RankUnreachable("rank 0 cannot be reached")
            self.view.state = ReplicaState.READY

        async def live(self) -> None:
            await asyncio.Event().wait()

    spec = parse_spec({"prefill": {"replicas": 0}, "decode": {"replicas": 1}})
    launch = Launch(spec=spec, log_dir="", credentials=DeploymentSecrets.new(index_url="redis://127.0.0.1:1"))
    for function in ("put", "get", "delete"):
        monkeypatch.setattr(internals, function, lambda *key, namespace: None)
    monkeypatch.setattr(controller, "redirect_output", lambda path, who: None)
    monkeypatch.setattr(controller.desired_store, "load", lambda name: Desired(launch=launch))
    monkeypatch.setattr(replica_lifecycle, "find_replicas", lambda name: ["decode-0"])
    monkeypatch.setattr(controller, "find_replicas", lambda name: [])
    monkeypatch.setattr(replica_lifecycle, "remove_leftovers", lambda replica, name: removed.append(replica))
    monkeypatch.setattr(replica_lifecycle, "ReplicaLifecycle", Timeline)
    starting = Controller.__new__(Controller)
    await starting.__init__("a")  # type: ignore[misc,func-returns-value]
    pools = (await starting.status())["pools"]
    assert [replica["state"] for replica in pools["decode"]["replicas"]] == ["ready"] and not removed
    await starting.stop()


async def test_capture_file_is_removed_with_its_controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its salt is lost with the controller process, and the capture belongs to the deployment."""
    launch = Launch(
        spec=parse_spec({"prefill": {"replicas": 0}, "decode": {"replicas": 0}}),
        log_dir=str(tmp_path / "logs"),
        credentials=DeploymentSecrets.new(index_url="redis://127.0.0.1:1"),
    )
    for function in ("put", "get", "delete"):
        monkeypatch.setattr(internals, function, lambda *key, namespace: None)
    monkeypatch.setattr(controller, "redirect_output", lambda path, who: None)
    monkeypatch.setattr(controller.desired_store, "load", lambda name: Desired(launch=launch))
    for module in (replica_lifecycle, controller):
        monkeypatch.setattr(module, "find_replicas", lambda name: [])
    file = tmp_path / "audit_log" / "capture.jsonl"
    file.parent.mkdir()
    file.write_text("of the life before")
    starting = Controller.__new__(Controller)
    await starting.__init__("a")  # type: ignore[misc,func-returns-value]
    assert not file.exists()
    await starting.start_capture(max_bytes=1000)
    assert file.exists()
    await starting.stop()
    assert not file.exists()
