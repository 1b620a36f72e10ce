"""Controller restarted by Ray while Ray itself is coming back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RpcError

from cluster.control import controller, replica_lifecycle
from cluster.control.controller import Controller
from cluster.control.desired_state import Desired
from cluster.control.replica import ReplicaState
from cluster.control.replica_lifecycle import ReplicaLifecycle
from core.trace.traffic import SeenRequest, TrafficReport
from core.types.errors import DeployError, RankUnreachable, SpecError
from tests.cluster.deployments import make_desired

Start = Callable[..., Any]


@pytest.fixture
def removed() -> list[str]:
    """Replicas that the controller has removed."""
    return []


@pytest.fixture
def start(
    ray_store: object, removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Desired | None, Callable[[], list[str]]], Any]:
    """start(desired, found) -> controller whose Ray lists the replicas `found()`."""
    monkeypatch.setattr(replica_lifecycle, "_TRY_AGAIN_S", 0.02)
    monkeypatch.setattr(controller, "redirect_output", lambda path, who: None)
    monkeypatch.setattr(replica_lifecycle, "remove_leftovers", lambda replica, name: removed.append(replica))

    async def make(desired: Desired | None, found: Callable[[], list[str]] = list) -> Controller:
        monkeypatch.setattr(controller.desired_store, "load", lambda name: desired)
        for module in (replica_lifecycle, controller):
            monkeypatch.setattr(module, "find_replicas", lambda name: found())
        starting = Controller.__new__(Controller)
        await starting.__init__("a")  # type: ignore[misc,func-returns-value]
        return starting

    return make


async def test_adoption_retries_until_ray_lists_replicas(start: Start, removed: list[str]) -> None:
    answers: list[list[str] | Exception] = [RpcError("the control store is away"), ["decode-3"], []]

    def find_replicas() -> list[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    starting = await start(None, find_replicas)
    with pytest.raises(DeployError, match="nothing has been deployed yet"):
        await starting.status()
    assert removed == ["decode-3"], "it was found, but is not desired"
    await starting.stop()
    assert not answers


async def test_temporarily_unreachable_replica_is_adopted(
    start: Start, removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts do not come back all at once when the controller's host has rebooted."""

    class Timeline(ReplicaLifecycle):
        num_tries = 0

        async def adopt(self) -> None:
            self.num_tries += 1
            if self.num_tries == 1:
                raise RankUnreachable("rank 0 cannot be reached")
            self.view.state = ReplicaState.READY

        async def live(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(replica_lifecycle, "ReplicaLifecycle", Timeline)
    answers = iter([["decode-0"], []])
    starting = await start(make_desired({"prefill": {"replicas": 0}, "decode": {"replicas": 1}}), lambda: next(answers))
    pools = (await starting.status())["pools"]
    assert [replica["state"] for replica in pools["decode"]["replicas"]] == ["ready"] and not removed
    await starting.stop()


async def test_single_capture_whose_file_is_removed_with_its_controller(start: Start, tmp_path: Path) -> None:
    """Its salt is lost with the controller process, and the capture belongs to the deployment."""
    desired = make_desired({"prefill": {"replicas": 0}, "decode": {"replicas": 0}}, log_dir=str(tmp_path / "logs"))
    file = tmp_path / "audit_log" / "capture.jsonl"
    file.parent.mkdir()
    file.write_text("of the life before")
    starting: Controller = await start(desired)
    assert not file.exists()
    with pytest.raises(SpecError, match="no capture"):
        await starting.read_capture(0, 1)

    async def note(number: int) -> None:
        seen = SeenRequest(arrival_s=0.0, num_tokens=150, ids=(11,), num_output=7)
        await starting.note_traffic(TrafficReport(router="a", arrived={number: seen}, changed={}))

    await starting.start_capture(max_bytes=10_000)
    with pytest.raises(SpecError, match="under way"):
        await starting.start_capture(max_bytes=10_000)
    await note(0)
    report = await starting.capture()
    assert report and report["requests"] == 1
    [line] = (await starting.read_capture(0, 10_000)).splitlines()
    assert json.loads(line)["output_length"] == 7
    await starting.stop_capture()
    assert await starting.capture() is None and not file.exists()
    await note(1)
    await starting.start_capture(max_bytes=1000)
    assert file.exists()
    await starting.stop()
    assert not file.exists()
