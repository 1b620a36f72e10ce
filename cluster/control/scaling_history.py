"""Autoscaler history in Ray's store, from which a restarted controller continues."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from cluster.control.desired_state import namespace
from cluster.ray.store import StoreEntry
from core.types.json_records import known_fields
from planner.autoscaler.decide import AutoscaleState, Trust
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import Prediction, ScalingDecision

_STORED = 50  # decisions


@dataclass(frozen=True)
class ScalingHistory:
    state: AutoscaleState
    decisions: list[ScalingDecision]  # oldest first


def save(name: str, state: AutoscaleState, decisions: Iterable[ScalingDecision]) -> None:
    """Store the state and the last 50 decisions. Raises DeployError."""
    last = [decision.as_dict() for decision in [*decisions][-_STORED:]]
    _entry(name).put(json.dumps({"state": asdict(state), "decisions": last}))


def load(name: str) -> ScalingHistory | None:
    """Return the stored history, or None if there is none. Raises DeployError."""
    if not (text := _entry(name).get()):
        return None
    tree: dict[str, Any] = json.loads(text)
    return ScalingHistory(_read_state(tree["state"]), [ScalingDecision.of(one) for one in tree["decisions"]])


def forget(name: str) -> None:
    _entry(name).delete()


def _entry(name: str) -> StoreEntry:
    return StoreEntry("autoscale", namespace=namespace(name))


def _read_state(tree: dict[str, Any]) -> AutoscaleState:
    expected, calm = tree["expected"], tree["calm_sizes"]
    read = {
        "expected": Prediction.of(expected) if expected else None,
        "calm_sizes": PoolSizes(*calm) if calm else None,
        "trust": Trust(**known_fields(Trust, tree["trust"])),
    }
    return AutoscaleState(**{**known_fields(AutoscaleState, tree), **read})
