"""Report of a simulation: cache reuse, latencies, throughput and goodput."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from core.trace.statistics import spread
from planner.simulator.flight import Flight


class Report:
    """Collector of a simulation's results."""

    def __init__(self, *, slo_ttft_s: float | None = None, slo_itl_s: float | None = None) -> None:
        """slo_ttft_s, slo_itl_s: limits for a good request, on its TTFT and its mean ITL; None: no limit."""
        self.shipped_bytes = 0.0
        self.fetched_bytes = 0.0
        self.flights: list[Flight] = []
        self._slo = (slo_ttft_s, slo_itl_s)
        self._gaps, self._gap_counts = array("d"), array("q")
        self._decisions = array("d")

    def decided(self, seconds: float) -> None:
        self._decisions.append(seconds)

    def gap(self, seconds: float, count: int) -> None:
        """Record `count` tokens, each `seconds` after the one before."""
        self._gaps.append(seconds)
        self._gap_counts.append(count)

    def ended(self, flight: Flight) -> None:
        flight.hashes = []
        self.flights.append(flight)

    def summary(self) -> dict[str, Any]:
        """Summarize: times in milliseconds, rates per second of virtual time up to the last token."""
        ttft = np.array([flight.ttft_s for flight in self.flights]) * 1e3
        itl = np.asarray(self._gaps) * 1e3
        prompt_tokens = sum(flight.request.num_tokens for flight in self.flights)
        duration_s = max((flight.ended_at for flight in self.flights), default=0.0)
        per_s = 1 / duration_s if duration_s else 0.0
        decisions = np.asarray(self._decisions) * 1e6
        return {
            "completed": len(self.flights),
            "duration_s": duration_s,
            "reuse_share": sum(flight.num_cached for flight in self.flights) / max(1, prompt_tokens),
            "prompt_tokens": prompt_tokens,
            "output_tokens": (output_tokens := sum(flight.request.num_output for flight in self.flights)),
            "output_tokens_per_s": output_tokens * per_s,
            "ttft_ms": spread(ttft),
            "itl_ms": spread(itl, self._gap_counts),
            "e2e_ms": spread(np.array([flight.ended_at - flight.request.arrival_s for flight in self.flights]) * 1e3),
            "goodput_rps": sum(map(self._is_good, self.flights)) * per_s,
            "good_share": sum(map(self._is_good, self.flights)) / max(1, len(self.flights)),
            "transfer_bytes": self.shipped_bytes,
            "pull_bytes": self.fetched_bytes,
            "decision_us": {f"p{q}": float(np.percentile(decisions, q)) if len(decisions) else 0.0 for q in (50, 95)},
        }

    def _is_good(self, flight: Flight) -> bool:
        ttft_s, itl_s = self._slo
        return (ttft_s is None or flight.ttft_s <= ttft_s) and (itl_s is None or flight.mean_itl_s <= itl_s)
