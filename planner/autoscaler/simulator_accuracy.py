"""Accuracy of the simulator: comparison of its predictions with measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.autoscaler.scaling_decision import Prediction

BAND = 2.0  # accepted factor between prediction and measurement, for median TTFT and mean ITL
_NEW = 0.4  # weight of one comparison
_PATIENCE = 3  # consecutive comparisons that change the verdict
_ENOUGH = 10  # requests for a full comparison; fewer cannot end trust, and count less when restoring it
_SMALL = 0.25  # fraction of a limit below which latencies count as equal, since they change no decision


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Trust in the simulator. Immutable: `after` returns the trust after one more comparison."""

    ttft_log: float = 0.0  # smoothed log(measured / predicted)
    itl_log: float = 0.0
    streak: int = 0  # consecutive comparisons that contradict is_trusted
    is_trusted: bool = True

    def after(
        self, predicted: Prediction, measured: Mapping[str, float], *, slo_ttft_s: float, slo_itl_s: float
    ) -> Trust:
        """Return the trust after one comparison.

        measured: num, ttft_p50_s and itl_s (see ScalingDecision), under the predicted sizes.
        """
        if measured["num"] < (_ENOUGH if self.is_trusted else 1):
            return self
        weight = _NEW * min(1.0, measured["num"] / _ENOUGH)
        ttft_log = _log_ratio(measured["ttft_p50_s"], predicted.ttft_p50_s, at_least=_SMALL * slo_ttft_s)
        itl_log = _log_ratio(measured["itl_s"], predicted.itl_s, at_least=_SMALL * slo_itl_s)
        new = replace(
            self,
            ttft_log=self.ttft_log + weight * (ttft_log - self.ttft_log),
            itl_log=self.itl_log + weight * (itl_log - self.itl_log),
        )
        is_within = max(abs(new.ttft_log), abs(new.itl_log)) <= math.log(BAND)
        if is_within is self.is_trusted:
            return replace(new, streak=0)
        if self.streak + 1 < _PATIENCE:
            return replace(new, streak=self.streak + 1)
        return replace(new, streak=0, is_trusted=is_within)

    def __str__(self) -> str:
        return f"measured / predicted: TTFT {math.exp(self.ttft_log):.2f}, ITL {math.exp(self.itl_log):.2f}"


def _log_ratio(measured: float, predicted: float, *, at_least: float) -> float:
    return math.log(max(measured, at_least) / max(predicted, at_least))
