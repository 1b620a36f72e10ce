"""One decision of the autoscaler, as everybody tells it: `cluster autoscale`, the log, and whoever shows pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from core.types.json_records import known_fields
from planner.autoscaler.pool_sizes import PoolSizes, ScaleMoves

Mode = Literal["simulator", "saturation", "limits", "idle", "waiting"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the simulator says of one pair of sizes under the load that is forecast, times `load`."""

    sizes: PoolSizes
    load: float
    good_share: float  # of the requests keep both limits
    ttft_share: float  # keep the first
    itl_share: float
    ttft_p50_s: float
    ttft_p90_s: float
    itl_s: float  # mean
    reuse_share: float  # of prompt tokens
    num: int = 0  # requests that were simulated
    lasting_share: float | None = None  # good, of these and of more of their like for some minutes

    @property
    def expected_share(self) -> float:
        """Good, of the requests that a decision is made for."""
        return self.good_share if self.lasting_share is None else self.lasting_share

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Prediction:
        """Of what asdict has made, by any version."""
        return cls(**{**known_fields(cls, tree), "sizes": PoolSizes(*tree["sizes"])})

    def __str__(self) -> str:
        more = f" at {self.load:.0%} of the load" if self.load != 1 else ""
        return f"{self.sizes}{more}: {self.expected_share:.1%} good"


@dataclass(frozen=True, kw_only=True)
class ScalingDecision:
    """What was decided, and why. Plain values: `as_dict` is JSON, `of` reads it again."""

    number: int  # since the autoscaler's history began
    time_s: float  # of the clock that it was decided by: seconds since 1970, or of a replay
    before: PoolSizes
    after: PoolSizes  # the same: nothing changes
    mode: Mode  # what it was decided by
    reason: str  # one sentence
    moves: ScaleMoves = field(default_factory=ScaleMoves)
    load: str = ""  # what was seen, and what is forecast
    rate: float = 0.0  # requests a second, forecast
    tried: tuple[Prediction, ...] = ()
    measured: Mapping[str, float] | None = None  # since the last decision: num, good_share, ttft_p50_s, itl_s
    worth_s: float = 0.0  # seconds of all requests that the change should save, until it could be taken back
    price_s: float = 0.0  # and costs
    took_s: float = 0.0  # to decide
    is_dry_run: bool = False

    @property
    def is_change(self) -> bool:
        return self.after != self.before

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "before": list(self.before), "after": list(self.after)}

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> ScalingDecision:
        """What another version says beyond this is passed over."""
        tried = tuple(Prediction.of(one) for one in tree["tried"])
        read = {"before": PoolSizes(*tree["before"]), "after": PoolSizes(*tree["after"]), "tried": tried}
        return cls(
            **{**known_fields(cls, tree), **read, "moves": ScaleMoves(**known_fields(ScaleMoves, tree["moves"]))}
        )
