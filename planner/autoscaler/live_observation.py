"""What a controller knows when it asks for a decision: plain values, for a process beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.spec.schema import Spec
from core.trace.traffic import ReplicaReport, SeenRequest
from planner.autoscaler.observation import ChangePrice


@dataclass(frozen=True, kw_only=True)
class LiveObservation:
    """Of one deployment, now."""

    spec: Spec  # with `autoscale`
    now_s: float  # of the clock by which requests arrived
    time_s: float  # since 1970, for people
    requests: Sequence[SeenRequest]
    replicas: Sequence[ReplicaReport]
    num_waiting: int
    price: ChangePrice
    is_changing: bool
