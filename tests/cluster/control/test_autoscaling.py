"""The autoscaler's control loop in a controller: observations, applied and stored decisions, conflicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.control import scaling_history
from cluster.control.autoscaling import Autoscaling
from cluster.control.desired_state import Desired
from cluster.control.pool import RolePools
from cluster.control.scaling_history import ScalingHistory
from cluster.control.traffic_log import TrafficLog
from cluster.rollout.update import Update
from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.spec.schema import AutoscaleSpec
from core.types.launch import Launch
from core.types.request import Role
from planner.autoscaler.decide import AutoscaleState
from planner.autoscaler.observation import LiveObservation
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import Prediction, ScalingDecision
from tests.support.waiting import becomes


class FakeHistory:
    """Stand-in for the history in Ray's store."""

    def __init__(self) -> None:
        self.stored: ScalingHistory | None = None

    def load(self, name: str, /) -> ScalingHistory | None:
        return self.stored

    def save(self, name: str, state: AutoscaleState, decisions: Iterable[ScalingDecision], /) -> None:
        self.stored = ScalingHistory(state, list(decisions))


class _Site:
    """Deployment of 2P2D whose autoscaler always wants 1P3D."""

    def __init__(self, tmp_path: Path, history: FakeHistory | None = None, **rules: Any) -> None:
        tree = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}, "autoscale": {"max_devices": 4, **rules}}
        launch = Launch(
            spec=parse_spec(tree, origin="a test"),
            log_dir=str(tmp_path),
            credentials=DeploymentSecrets.new(index_url="redis://localhost"),
        )
        self.desired = Desired(launch=launch)
        self.history = history or FakeHistory()
        self.observations: list[LiveObservation] = []
        self.scaled: list[dict[str, int]] = []
        self.before_done = self.before_scaled = lambda: None
        self.autoscaling = self.restart()

    def restart(self) -> Autoscaling:
        return Autoscaling(
            "test",
            {role: RolePools(role, changed=lambda: None) for role in Role},
            TrafficLog(),
            desired=lambda: self.desired,
            scale=self._scale,
            decide=self._decide,
            store=self.history,
        )

    async def _decide(
        self, state: AutoscaleState, observation: LiveObservation
    ) -> tuple[AutoscaleState, ScalingDecision]:
        self.observations.append(observation)
        spec = observation.spec
        number = state.number + 1
        decision = ScalingDecision(
            number=number,
            time_s=observation.time_s,
            before=PoolSizes(spec.prefill.replicas, spec.decode.replicas),
            after=PoolSizes(1, 3),
            mode="simulator",
            reason="so it is",
            is_dry_run=bool(spec.autoscale and spec.autoscale.dry_run),
        )
        self.before_done()
        return replace(state, number=number), decision

    async def _scale(self, sizes: dict[str, int]) -> None:
        self.before_scaled()
        self.scaled.append(sizes)
        for role, number in sizes.items():
            self.desired.scale(Role(role), number)


async def test_both_pools_scale_as_one_change_with_a_reason(tmp_path: Path) -> None:
    site = _Site(tmp_path)
    await site.autoscaling.decide_once()
    assert site.scaled == [{"prefill": 1, "decode": 3}]
    report = site.autoscaling.report()
    assert report["sizes"] == [1, 3] and report["decisions"][0]["reason"] == "so it is"
    assert "started without history" in report["history"]
    assert [(shown.text.endswith(" -> 1P3D"), shown.reason) for shown in site.autoscaling.shown()] == [
        (True, "so it is")
    ]


async def test_only_equal_pools_may_switch(tmp_path: Path) -> None:
    site = _Site(tmp_path)
    await site.autoscaling.decide_once()
    site.desired.launch = replace(
        site.desired.launch,
        spec=site.desired.spec.model_copy(
            update={"decode": site.desired.spec.decode.model_copy(update={"tensor_parallel": 2})}
        ),
    )
    await site.autoscaling.decide_once()
    alike, unlike = (observation.price.switch_s for observation in site.observations)
    assert alike is not None and unlike is None


async def test_dry_run_reports_but_changes_nothing(tmp_path: Path) -> None:
    site = _Site(tmp_path, dry_run=True)
    decision = await site.autoscaling.decide_once()
    assert site.scaled == [] and decision and decision.is_change and decision.is_dry_run


async def test_no_decision_without_autoscale_in_the_spec(tmp_path: Path) -> None:
    site = _Site(tmp_path)
    site.desired.launch = replace(site.desired.launch, spec=site.desired.spec.model_copy(update={"autoscale": None}))
    assert await site.autoscaling.decide_once() is None and not site.observations
    assert site.autoscaling.report()["rules"] is None


async def test_restart_continues_the_history(tmp_path: Path) -> None:
    site = _Site(tmp_path)
    await site.autoscaling.decide_once()
    again = site.restart()
    decision = await again.decide_once()
    assert decision and decision.number == 2
    assert [one["number"] for one in again.report()["decisions"]] == [1, 2]
    assert "continued from an earlier run" in again.report()["history"]


async def test_concurrent_decision_of_another_run_wins(tmp_path: Path) -> None:
    site = _Site(tmp_path)
    await site.autoscaling.decide_once()
    other = site.history.stored
    assert other

    def another_decides() -> None:
        site.history.save("test", replace(other.state, number=7), other.decisions)

    site.before_done = another_decides
    assert await site.autoscaling.decide_once() is None and len(site.scaled) == 1
    site.before_done = lambda: None
    decision = await site.autoscaling.decide_once()
    assert decision and decision.number == 8


async def test_decision_for_outdated_sizes_is_dropped(tmp_path: Path) -> None:
    site = _Site(tmp_path)
    site.before_done = lambda: site.desired.scale(Role.DECODE, 5)
    assert await site.autoscaling.decide_once() is None
    assert site.scaled == [] and site.autoscaling.report()["sizes"] == [2, 5]


async def test_decision_by_outdated_rules_is_dropped(tmp_path: Path) -> None:
    """A decision may take minutes, during which an operator turns the autoscaler off or makes it a dry run."""
    for rules in (None, AutoscaleSpec(max_devices=4, dry_run=True)):
        site = _Site(tmp_path)
        site.before_done = lambda site=site, rules=rules: site.desired.set_autoscale(rules)  # type: ignore[misc]
        assert await site.autoscaling.decide_once() is None
        assert site.scaled == [] and not site.autoscaling.report()["decisions"]


async def test_no_decision_during_an_update(tmp_path: Path) -> None:
    site = _Site(tmp_path)
    update = Update(revision=2, spec=site.desired.spec, roles=frozenset(Role))
    site.before_done = lambda: setattr(site.desired, "update", update)
    # It began in the meantime.
    assert await site.autoscaling.decide_once() is None and len(site.observations) == 1
    assert await site.autoscaling.decide_once() is None and len(site.observations) == 1
    assert site.scaled == [] and site.history.stored is None


async def test_decision_is_stored_before_it_is_applied(tmp_path: Path) -> None:
    """Otherwise a controller that dies in between would make the same decision again under the same number."""
    site = _Site(tmp_path)

    def fails() -> None:
        assert site.history.stored and site.history.stored.state.number == 1
        raise RuntimeError("the controller dies")

    site.before_scaled = fails
    with pytest.raises(RuntimeError):
        await site.autoscaling.decide_once()


async def test_unexpected_error_is_reported_and_the_loop_continues(tmp_path: Path) -> None:
    site = _Site(tmp_path, interval_s=1)

    def fails() -> None:
        raise KeyError("of a newer version")

    site.before_done = fails
    running = asyncio.create_task(site.autoscaling.run_forever())
    await becomes(lambda: site.autoscaling.report()["problem"] == "KeyError: 'of a newer version'")
    site.before_done = lambda: None
    await becomes(lambda: site.scaled)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_history_of_another_version_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored: list[str] = []
    store = SimpleNamespace(put=stored.append, get=lambda: stored[-1])
    monkeypatch.setattr(scaling_history, "StoreEntry", lambda *names, **more: store)
    seen = Prediction(
        sizes=PoolSizes(1, 3), load=1.0, good_share=1.0, ttft_share=1.0, itl_share=1.0,
        ttft_p50_s=0.1, ttft_p90_s=0.2, itl_s=0.01, reuse_share=0.5,
    )  # fmt: skip
    site = _Site(tmp_path)
    decision = await site.autoscaling.decide_once()
    assert decision
    state, decisions = AutoscaleState(number=1, expected=seen), [replace(decision, tried=(seen,))]
    scaling_history.save("test", state, decisions)
    tree = json.loads(stored[-1])
    first, then = tree["state"], tree["decisions"][0]
    for part in (tree, first, first["trust"], first["expected"], then, then["moves"], then["tried"][0]):
        part["of a newer version"] = 1
    stored.append(json.dumps(tree))
    assert scaling_history.load("test") == ScalingHistory(state, decisions)
