"""Input of a scaling decision about a live deployment: plain values, for a separate process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.spec.schema import Spec
from core.trace.traffic import ReplicaReport, SeenRequest
from planner.autoscaler.observation import ChangePrice


@dataclass(frozen=True, kw_only=True)
class LiveObservation:
    """State of one deployment at the time of a decision."""

    spec: Spec  # has `autoscale`
    now_s: float  # on the clock of the requests' arrival times
    time_s: float  # unix time
    requests: Sequence[SeenRequest]
    replicas: Sequence[ReplicaReport]
    num_waiting: int
    price: ChangePrice
    is_changing: bool
