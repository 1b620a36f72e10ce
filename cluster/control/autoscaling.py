"""The autoscaler of a deployment at work: it looks, has a decision made in a process beside, and carries it out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol, TypedDict

from ray.exceptions import RayError

from cluster.control import scaling_history
from cluster.control.desired_state import Desired
from cluster.control.placement import live_nodes
from cluster.control.scaling_history import ScalingHistory
from cluster.control.traffic_log import TrafficLog
from cluster.ray.node_task import run_on
from cluster.rollout.role_pools import RolePools
from core.trace.traffic import ShownDecision
from core.types.errors import ClusterError
from core.types.request import Role
from core.types.role_switch import hindrance
from planner.autoscaler.decide import AutoscaleState
from planner.autoscaler.live_observation import LiveObservation
from planner.autoscaler.observation import ChangePrice
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import ScalingDecision

logger = logging.getLogger(__name__)

_KEPT = 200  # decisions
_SHOWN = 20
_DRY = " (dry run)"
_LOOK_S = 1.0  # whether the spec has an autoscaler now
_DECIDE_S = 120.0  # a decision takes no longer
_USUAL_START_S, _USUAL_DRAIN_S, _USUAL_SWITCH_S = 60.0, 10.0, 2.0  # until they are measured

Scale = Callable[[dict[str, int]], Awaitable[Any]]
Decide = Callable[[AutoscaleState, LiveObservation], Awaitable[tuple[AutoscaleState, ScalingDecision]]]


class HistoryStore(Protocol):
    """Where decisions outlive this process: cluster.control.scaling_history, or what a test has."""

    def load(self, name: str, /) -> ScalingHistory | None: ...
    def save(self, name: str, state: AutoscaleState, decisions: Iterable[ScalingDecision], /) -> None: ...


class AutoscaleReport(TypedDict):
    """`cluster autoscale status --json`."""

    rules: dict[str, Any] | None  # `autoscale` of the spec; None: nothing is decided
    sizes: list[int]  # prefill, decode: that are wanted
    history: str  # where it begins
    problem: str  # why the last decision could not be made or carried out; empty: it could
    decisions: list[dict[str, Any]]  # ScalingDecision.as_dict, the latest last
    replicas: list[dict[str, Any]]  # ReplicaNews, as a router knows them: what is simulated goes by their rates


async def _decide_beside(state: AutoscaleState, sight: LiveObservation) -> tuple[AutoscaleState, ScalingDecision]:
    """In a process of Ray's on the head: the controller answers meanwhile."""
    from planner.autoscaler.decide_live import decide_live  # with the simulator, of which this process has no use

    [head] = [node for node in live_nodes() if node.is_head]
    async with asyncio.timeout(_DECIDE_S):
        found: tuple[AutoscaleState, ScalingDecision] = await run_on(head.id, decide_live, state, sight)
        return found


class Autoscaling:
    """One for a deployment, in its one controller, on that one's event loop. What it has decided is numbered in Ray's
    store: a number that is taken there was given by another life, whose history counts; so no two decide one thing."""

    def __init__(
        self,
        name: str,
        pools: Mapping[Role, RolePools],
        traffic_log: TrafficLog,
        *,
        desired: Callable[[], Desired | None],
        scale: Scale,
        decide: Decide = _decide_beside,
        store: HistoryStore = scaling_history,
    ) -> None:
        self._pools = pools
        self._traffic_log = traffic_log
        self._desired = desired
        self._scale = scale
        self._decide = decide
        self._name = name
        self._store = store
        self._state: AutoscaleState | None = None  # None: not looked for yet
        self._decisions: deque[ScalingDecision] = deque(maxlen=_KEPT)
        self._history = "nothing was decided yet"
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
        """The last decisions, for whoever shows pictures."""
        last = list(self._decisions)[: -_SHOWN - 1 : -1]
        return tuple(
            ShownDecision(
                at=one.time_s,
                text=f"{one.before} -> {one.after}{_DRY if one.is_dry_run else ''}"
                if one.is_change
                else str(one.after),
                reason=one.reason,
            )
            for one in last
        )

    async def run_forever(self) -> None:
        """Every autoscale.interval_s, for as long as the spec has it."""
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
            except Exception as error:  # an edge: without this loop nothing is ever decided again, and nobody told
                logger.exception("unexpected")
                self._note_problem(error)

    async def decide_once(self) -> ScalingDecision | None:
        """Look, decide, and carry it out; None where somebody else has changed the sizes or the rules, or decided,
        meanwhile, and during an update, to which the sizes belong.

        Raises ClusterError, RayError, TimeoutError.
        """
        desired = self._desired()
        if desired is None or desired.spec.autoscale is None or desired.update:
            return None
        rules = desired.spec.autoscale
        state = self._known_state()
        new_state, decision = await self._decide(state, self._sight(desired))
        stored = self._store.load(self._name)
        if stored and stored.state.number > state.number:
            self._take_over(stored)
            return None
        now = self._desired()
        if now is None or now.update or now.spec.autoscale != rules or self._sizes() != decision.before:
            return None  # an operator was there meanwhile: what was decided is of other sizes, or by other rules
        self._state = new_state
        self._decisions.append(decision)
        # Before it is done: whoever comes after us knows of it.
        self._store.save(self._name, new_state, self._decisions)
        logger.info("autoscale %s -> %s by %s: %s", decision.before, decision.after, decision.mode, decision.reason)
        if decision.is_change and not decision.is_dry_run:
            await self._scale({Role.PREFILL.value: decision.after.prefill, Role.DECODE.value: decision.after.decode})
        return decision

    def _note_problem(self, error: Exception) -> None:
        self._problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        logger.warning("nothing is decided of the pools' sizes: %s", self._problem)

    def _sight(self, desired: Desired) -> LiveObservation:
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

    # Across lives of the controller.

    def _known_state(self) -> AutoscaleState:
        if self._state is None:
            if stored := self._store.load(self._name):
                self._take_over(stored)
            else:
                self._history = f"it began anew at {time.strftime('%Y-%m-%d %H:%M:%S')}"
                self._state = AutoscaleState()
        assert self._state
        return self._state

    def _take_over(self, stored: ScalingHistory) -> None:
        self._state = replace(stored.state, decided_s=time.monotonic(), expected=None)
        self._decisions = deque(stored.decisions, maxlen=_KEPT)
        self._history = f"taken over from an earlier life of the controller, up to decision {self._state.number}"


def _mean(seconds: list[float], usual: float) -> float:
    return sum(seconds) / len(seconds) if seconds else usual
