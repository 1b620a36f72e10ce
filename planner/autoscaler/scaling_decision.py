"""Record of one scaling decision, for `cluster autoscale`, the log and dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from planner.autoscaler.pool_sizes import PoolSizes, ScaleMoves

Mode = Literal["simulator", "saturation", "limits", "idle", "waiting"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Simulated outcome of one pair of sizes under `load` times the forecast load."""

    sizes: PoolSizes
    load: float
    good_share: float  # share of requests that keep both limits
    ttft_share: float  # share that keeps the TTFT limit
    itl_share: float  # share that keeps the ITL limit
    ttft_p50_s: float
    ttft_p90_s: float
    itl_s: float  # mean
    reuse_share: float  # share of prompt tokens found in caches
    num: int = 0  # simulated requests
    lasting_share: float | None = None  # good_share extrapolated over the lifetime of a decision

    @property
    def expected_share(self) -> float:
        """Share of good requests over the lifetime of a decision."""
        return self.good_share if self.lasting_share is None else self.lasting_share

    def __str__(self) -> str:
        more = f" at {self.load:.0%} of the load" if self.load != 1 else ""
        return f"{self.sizes}{more}: {self.expected_share:.1%} good"


@dataclass(frozen=True, kw_only=True)
class ScalingDecision:
    """Decision with its reasons. Plain values: `as_dict` gives JSON, `of` reads it."""

    number: int = 0  # sequence number in the autoscaler's history
    time_s: float  # unix time, or virtual time of a replay
    before: PoolSizes
    after: PoolSizes  # equal to `before`: no change
    mode: Mode  # basis of the decision
    reason: str  # one sentence
    moves: ScaleMoves = field(default_factory=ScaleMoves)
    load: str = ""  # observed and forecast load
    rate: float = 0.0  # forecast requests per second
    tried: tuple[Prediction, ...] = ()
    measured: Mapping[str, float] | None = None  # since the last decision: num, good_share, ttft_p50_s, itl_s
    worth_s: float = 0.0  # expected benefit of the change, in seconds of the whole traffic
    price_s: float = 0.0  # cost of the change, in the same unit
    took_s: float = 0.0  # duration of the decision
    is_dry_run: bool = False

    @property
    def is_change(self) -> bool:
        return self.after != self.before

    @property
    def sizes(self) -> str:
        """Sizes before and after a change, or the sizes that stay."""
        return f"{self.before} -> {self.after}" if self.is_change else str(self.after)

    def as_dict(self) -> dict[str, Any]:
        tree: dict[str, Any] = msgspec.to_builtins(self)
        return tree

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> ScalingDecision:
        """Read the output of `as_dict`, ignoring fields of newer versions."""
        return msgspec.convert(tree, cls)
