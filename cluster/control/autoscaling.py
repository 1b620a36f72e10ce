"""The autoscaler's control loop: observe, let a process on the head decide, apply the decision."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict

import msgspec
from ray.exceptions import RayError

from cluster.control.desired_state import Desired
from cluster.control.placement import live_nodes, run_on
from cluster.control.pool import ReplicaPool
from cluster.control.traffic import TrafficLog
from cluster.ray import store
from cluster.ray.store import namespace
from core.trace.traffic import ShownDecision
from core.types.errors import ClusterError
from core.types.request import Role
from core.types.role_switch import hindrance
from planner.autoscaler.decide import AutoscaleState
from planner.autoscaler.observation import ChangePrice, LiveObservation
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import ScalingDecision

logger = logging.getLogger(__name__)

_KEPT, _STORED, _SHOWN = 200, 50, 20  # decisions
_ENTRY = "autoscale"
_DRY = " (dry run)"
# Interval at which the spec is checked for an `autoscale` section.
_LOOK_S = 1.0
# Deadline for one decision.
_DECIDE_S = 120.0
# Defaults until measured.
_USUAL_START_S, _USUAL_DRAIN_S, _USUAL_SWITCH_S = 60.0, 10.0, 2.0

Scale = Callable[[dict[str, int]], Awaitable[Any]]
Decide = Callable[[AutoscaleState, LiveObservation], Awaitable[tuple[AutoscaleState, ScalingDecision]]]


@dataclass(frozen=True)
class ScalingHistory:
    """History in Ray's store, from which a restarted controller continues."""

    state: AutoscaleState
    decisions: list[ScalingDecision]  # oldest first


class AutoscaleReport(TypedDict):
    """Content of `cluster autoscale status --json`."""

    # The `autoscale` section of the spec; None if autoscaling is off.
    rules: dict[str, Any] | None
    # Desired pool sizes: prefill, decode.
    sizes: list[int]
    # Origin of the decision history.
    history: str
    # Reason why the last decision could not be made or applied; empty if it was.
    problem: str
    # ScalingDecision.as_dict of each, oldest first.
    decisions: list[dict[str, Any]]
    # ReplicaReport of each, as the router sees it. The simulator uses their measured rates.
    replicas: list[dict[str, Any]]


async def _decide_on_head(
    state: AutoscaleState, observation: LiveObservation
) -> tuple[AutoscaleState, ScalingDecision]:
    """Decide in a Ray process on the head, so that the controller keeps answering."""
    # Imported here because it brings the simulator, which the controller process does not need.
    from planner.autoscaler.live import decide_live

    [head] = [node for node in live_nodes() if node.is_head]
    async with asyncio.timeout(_DECIDE_S):
        found: tuple[AutoscaleState, ScalingDecision] = await run_on(head.id, decide_live, state, observation)
        return found


class Autoscaling:
    """Autoscaler of one deployment, run by its controller on the controller's event loop.

    Decisions are numbered in Ray's store. A higher number there was written by a later run of the controller: its
    history replaces ours, so that no two runs make the same decision.
    """

    def __init__(
        self,
        name: str,
        pools: Mapping[Role, ReplicaPool],
        traffic_log: TrafficLog,
        *,
        desired: Callable[[], Desired | None],
        scale: Scale,
        decide: Decide = _decide_on_head,
    ) -> None:
        self._pools = pools
        self._traffic_log = traffic_log
        self._desired = desired
        self._scale = scale
        self._decide = decide
        self._name = name
        # None until it is loaded.
        self._state: AutoscaleState | None = None
        self._decisions: deque[ScalingDecision] = deque(maxlen=_KEPT)
        self._history = "no decision yet"
        self._problem = ""

    def report(self) -> AutoscaleReport:
        desired = self._desired()
        rules = desired.spec.autoscale if desired else None
        spec = desired.spec if desired else None
        return {
            "rules": rules.model_dump(mode="json") if rules else None,
            "sizes": [spec.prefill.replicas, spec.decode.replicas] if spec else [],
            "history": self._history,
            "problem": self._problem,
            "decisions": [decision.as_dict() for decision in self._decisions],
            "replicas": [asdict(replica) for replica in self._traffic_log.replicas],
        }

    def shown(self) -> tuple[ShownDecision, ...]:
        """Return the last decisions, for dashboards."""
        last = list(self._decisions)[: -_SHOWN - 1 : -1]
        return tuple(
            ShownDecision(
                at=one.time_s, text=one.sizes + (_DRY if one.is_change and one.is_dry_run else ""), reason=one.reason
            )
            for one in last
        )

    async def run_forever(self) -> None:
        """Decide every autoscale.interval_s while the spec has that section."""
        while True:
            desired = self._desired()
            rules = desired.spec.autoscale if desired else None
            await asyncio.sleep(rules.interval_s if rules else _LOOK_S)
            if rules is None:
                continue
            try:
                await self.decide_once()
                self._problem = ""
            except (ClusterError, RayError, TimeoutError, ValueError) as error:
                self._note_problem(error)
            except Exception as error:
                # Catch everything: if this loop ended, autoscaling would stop silently.
                logger.exception("unexpected autoscaling error")
                self._note_problem(error)

    async def decide_once(self) -> ScalingDecision | None:
        """Observe, decide, store the decision and apply it.

        Returns None during an update, which owns the pool sizes, and if the sizes, the rules or the stored decisions
        changed while deciding. Raises ClusterError, RayError, TimeoutError.
        """
        desired = self._desired()
        if desired is None or desired.spec.autoscale is None or desired.update:
            return None
        rules = desired.spec.autoscale
        state = self._load_state()
        new_state, decision = await self._decide(state, self._observe(desired))
        stored = load_history(self._name)
        if stored and stored.state.number > state.number:
            self._take_over(stored)
            return None
        now = self._desired()
        if now is None or now.update or now.spec.autoscale != rules or self._sizes() != decision.before:
            # An operator changed the sizes or the rules while we decided: the decision no longer applies.
            return None
        self._state = new_state
        self._decisions.append(decision)
        # Stored before it is applied, so that the next run of the controller knows of it.
        save_history(self._name, new_state, self._decisions)
        logger.info("autoscale %s -> %s by %s: %s", decision.before, decision.after, decision.mode, decision.reason)
        if decision.is_change and not decision.is_dry_run:
            await self._scale({Role.PREFILL.value: decision.after.prefill, Role.DECODE.value: decision.after.decode})
        return decision

    def _note_problem(self, error: Exception) -> None:
        self._problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        logger.warning("autoscaling failed error=%s", self._problem)

    def _observe(self, desired: Desired) -> LiveObservation:
        pools = self._pools
        drain_s = _mean([s for pool in pools.values() for s in pool.drain_times_s], _USUAL_DRAIN_S)
        switches = [max(0.0, s - drain_s) for pool in pools.values() for s in pool.switch_times_s]
        return LiveObservation(
            spec=desired.spec,
            now_s=time.monotonic(),
            time_s=time.time(),
            requests=self._traffic_log.recent(),
            replicas=self._traffic_log.replicas,
            num_waiting=self._traffic_log.num_waiting,
            price=ChangePrice(
                start_prefill_s=_mean(pools[Role.PREFILL].start_times_s, _USUAL_START_S),
                start_decode_s=_mean(pools[Role.DECODE].start_times_s, _USUAL_START_S),
                drain_s=drain_s,
                switch_s=None if hindrance(desired.spec) else _mean(switches, _USUAL_SWITCH_S),
            ),
            is_changing=any(pool.is_changing(desired.spec.pool(role).replicas) for role, pool in pools.items()),
        )

    def _sizes(self) -> PoolSizes | None:
        desired = self._desired()
        return PoolSizes(desired.spec.prefill.replicas, desired.spec.decode.replicas) if desired else None

    # Continuity across restarts of the controller.

    def _load_state(self) -> AutoscaleState:
        if self._state is None:
            if stored := load_history(self._name):
                self._take_over(stored)
            else:
                self._history = f"started without history at {time.strftime('%Y-%m-%d %H:%M:%S')}"
                self._state = AutoscaleState()
        assert self._state
        return self._state

    def _take_over(self, stored: ScalingHistory) -> None:
        self._state = replace(stored.state, decided_s=time.monotonic(), expected=None)
        self._decisions = deque(stored.decisions, maxlen=_KEPT)
        self._history = f"continued from an earlier run of the controller, up to decision {self._state.number}"


def save_history(name: str, state: AutoscaleState, decisions: Iterable[ScalingDecision]) -> None:
    """Store the state and the last 50 decisions. Raises DeployError."""
    history = ScalingHistory(state, [*decisions][-_STORED:])
    store.put(namespace(name), _ENTRY, msgspec.json.encode(history).decode())


def load_history(name: str) -> ScalingHistory | None:
    """Return the stored history, or None if there is none. Raises DeployError."""
    text = store.get(namespace(name), _ENTRY)
    return msgspec.json.decode(text, type=ScalingHistory) if text else None


def _mean(seconds: list[float], usual: float) -> float:
    return sum(seconds) / len(seconds) if seconds else usual
