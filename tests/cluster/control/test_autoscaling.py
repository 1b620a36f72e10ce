"""The autoscaler's control loop in a controller: observations, applied and stored decisions, conflicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.control.autoscaling import Autoscaling, ScalingHistory, load_history, save_history
from cluster.control.desired_state import Desired
from cluster.control.pool import ReplicaPool
from cluster.control.traffic import TrafficLog
from cluster.rollout.update import Update
from core.spec.schema import AutoscaleSpec
from core.types.request import Role
from planner.autoscaler.decide import AutoscaleState
from planner.autoscaler.observation import LiveObservation
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import Prediction, ScalingDecision
from tests.cluster.deployments import make_desired
from tests.support.waiting import becomes


@pytest.fixture(autouse=True)
def stored(ray_store: dict[tuple[str, str], bytes]) -> dict[tuple[str, str], bytes]:
    return ray_store


class _Site:
    """Deployment of 2P2D whose autoscaler always wants 1P3D."""

    def __init__(self, **rules: Any) -> None:
        autoscale = {"max_devices": 4, **rules}
        self.desired = make_desired({"prefill": {"replicas": 2}, "decode": {"replicas": 2}, "autoscale": autoscale})
        self.observations: list[LiveObservation] = []
        self.scaled: list[dict[str, int]] = []
        self.before_done = self.before_scaled = lambda: None
        self.autoscaling = self.restart()

    def restart(self) -> Autoscaling:
        return Autoscaling(
            "test",
            {role: ReplicaPool(role, changed=lambda: None) for role in Role},
            TrafficLog(),
            desired=lambda: self.desired,
            scale=self._scale,
            decide=self._decide,
        )

    async def _decide(
        self, state: AutoscaleState, observation: LiveObservation
    ) -> tuple[AutoscaleState, ScalingDecision]:
        self.observations.append(observation)
        spec, number = observation.spec, state.number + 1
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


async def test_both_pools_scale_as_one_change_with_a_reason() -> None:
    site = _Site()
    await site.autoscaling.decide_once()
    assert site.scaled == [{"prefill": 1, "decode": 3}]
    report = site.autoscaling.report()
    assert report["sizes"] == [1, 3] and report["decisions"][0]["reason"] == "so it is"
    assert "started without history" in report["history"]
    assert [(shown.text.endswith(" -> 1P3D"), shown.reason) for shown in site.autoscaling.shown()] == [
        (True, "so it is")
    ]


async def test_only_equal_pools_may_switch() -> None:
    site = _Site()
    await site.autoscaling.decide_once()
    spec = site.desired.spec
    decode = spec.decode.model_copy(update={"tensor_parallel": 2})
    site.desired = site.desired.of(spec.model_copy(update={"decode": decode}))
    await site.autoscaling.decide_once()
    alike, unlike = (observation.price.switch_s for observation in site.observations)
    assert alike is not None and unlike is None


async def test_dry_run_reports_but_changes_nothing() -> None:
    site = _Site(dry_run=True)
    decision = await site.autoscaling.decide_once()
    assert site.scaled == [] and decision and decision.is_change and decision.is_dry_run


async def test_no_decision_without_autoscale_in_the_spec() -> None:
    site = _Site()
    site.desired.set_autoscale(None)
    assert await site.autoscaling.decide_once() is None and not site.observations
    assert site.autoscaling.report()["rules"] is None


async def test_restart_continues_the_history() -> None:
    site = _Site()
    await site.autoscaling.decide_once()
    again = site.restart()
    decision = await again.decide_once()
    assert decision and decision.number == 2
    assert [one["number"] for one in again.report()["decisions"]] == [1, 2]
    assert "continued from an earlier run" in again.report()["history"]


async def test_concurrent_decision_of_another_run_wins() -> None:
    site = _Site()
    await site.autoscaling.decide_once()
    other = load_history("test")
    assert other
    site.before_done = lambda: save_history("test", replace(other.state, number=7), other.decisions)
    assert await site.autoscaling.decide_once() is None and len(site.scaled) == 1
    site.before_done = lambda: None
    decision = await site.autoscaling.decide_once()
    assert decision and decision.number == 8


@pytest.mark.parametrize(
    "change",
    [
        lambda desired: desired.scale(Role.DECODE, 5),
        lambda desired: desired.set_autoscale(None),
        lambda desired: desired.set_autoscale(AutoscaleSpec(max_devices=4, dry_run=True)),
    ],
    ids=["other sizes", "turned off", "dry run"],
)
async def test_decision_for_outdated_sizes_or_rules_is_dropped(change: Callable[[Desired], None]) -> None:
    """A decision may take minutes, during which an operator acts."""
    site = _Site()
    site.before_done = lambda: change(site.desired)
    assert await site.autoscaling.decide_once() is None
    assert site.scaled == [] and not site.autoscaling.report()["decisions"]


async def test_no_decision_during_an_update(stored: dict[tuple[str, str], bytes]) -> None:
    site = _Site()
    update = Update(revision=2, spec=site.desired.spec, roles=frozenset(Role))
    site.before_done = lambda: setattr(site.desired, "update", update)
    # It began in the meantime.
    assert await site.autoscaling.decide_once() is None and len(site.observations) == 1
    assert await site.autoscaling.decide_once() is None and len(site.observations) == 1
    assert site.scaled == [] and not stored


async def test_decision_is_stored_before_it_is_applied() -> None:
    """Otherwise a controller that dies in between would make the same decision again under the same number."""
    site = _Site()

    def fails() -> None:
        history = load_history("test")
        assert history and history.state.number == 1
        raise RuntimeError("the controller dies")

    site.before_scaled = fails
    with pytest.raises(RuntimeError):
        await site.autoscaling.decide_once()


async def test_unexpected_error_is_reported_and_the_loop_continues() -> None:
    site = _Site(interval_s=1)

    def fails() -> None:
        raise KeyError("of a newer version")

    site.before_done = fails
    running = asyncio.create_task(site.autoscaling.run_forever())
    await becomes(lambda: site.autoscaling.report()["problem"] == "KeyError: 'of a newer version'")
    site.before_done = lambda: None
    await becomes(lambda: site.scaled)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_history_of_another_version_is_read(stored: dict[tuple[str, str], bytes]) -> None:
    seen = Prediction(
        sizes=PoolSizes(1, 3), load=1.0, good_share=1.0, ttft_share=1.0, itl_share=1.0,
        ttft_p50_s=0.1, ttft_p90_s=0.2, itl_s=0.01, reuse_share=0.5,
    )  # fmt: skip
    decision = await _Site().autoscaling.decide_once()
    assert decision
    state, decisions = AutoscaleState(number=1, expected=seen), [replace(decision, tried=(seen,))]
    save_history("test", state, decisions)
    [(key, text)] = stored.items()
    tree = json.loads(text)
    first, then = tree["state"], tree["decisions"][0]
    for part in (tree, first, first["trust"], first["expected"], then, then["moves"], then["tried"][0]):
        part["of a newer version"] = 1
    stored[key] = json.dumps(tree).encode()
    assert load_history("test") == ScalingHistory(state, decisions)
