"""Candidate topology for a trace, with its simulated performance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.trace.trace import TraceRequest
from planner.simulator.fleet_setup import FleetSetup
from planner.simulator.profile import Profile
from planner.simulator.run import simulate


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Topology with its simulated performance. Without prefill replicas both roles are colocated: the decode replicas
    compute the prompts."""

    num_prefill: int
    num_decode: int
    prefill_threads: int  # per replica, on a CPU
    decode_threads: int
    decode_batch_tokens: int  # token limit of a step; limits the prompt chunks that decode replicas compute
    size: int  # resources, in replicas of the profile
    usd_per_hour: float
    good_share: float  # share of requests that keep the SLO
    goodput_rps: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    reuse_share: float
    strain: float  # maximum of P99 / limit over TTFT and ITL

    @property
    def topology(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"

    @property
    def is_colocated(self) -> bool:
        return not self.num_prefill

    @property
    def merit(self) -> tuple[float, float]:
        """Sort key: greater means that the SLO is kept better."""
        return self.good_share, -self.strain


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Setup, trace and SLO that all candidates share."""

    setup: FleetSetup
    profile: Profile
    trace: Sequence[TraceRequest]
    slo_ttft_s: float
    slo_itl_s: float

    def of(self, **changes: Any) -> Candidate:
        """Simulate the setup with these changes."""
        setup = replace(self.setup, **changes)
        slo = {"slo_ttft_s": self.slo_ttft_s, "slo_itl_s": self.slo_itl_s}
        return self._judged(setup, simulate(setup, self.profile, self.trace, **slo))

    def _judged(self, setup: FleetSetup, report: dict[str, Any]) -> Candidate:
        ttft, itl = report["ttft_ms"], report["itl_ms"]
        size = setup.num_prefill * setup.prefill_width + setup.num_decode * setup.decode_width
        return Candidate(
            num_prefill=setup.num_prefill,
            num_decode=setup.num_decode,
            prefill_threads=setup.prefill_width * self.profile.threads,
            decode_threads=setup.decode_width * self.profile.threads,
            decode_batch_tokens=setup.decode_batch_tokens,
            size=size,
            usd_per_hour=size * self.profile.usd_per_hour,
            good_share=report["good_share"],
            goodput_rps=report["goodput_rps"],
            ttft_p50_ms=ttft["p50"],
            ttft_p99_ms=ttft["p99"],
            itl_p50_ms=itl["p50"],
            itl_p99_ms=itl["p99"],
            reuse_share=report["reuse_share"],
            strain=max(ttft["p99"] / (self.slo_ttft_s * 1e3), itl["p99"] / (self.slo_itl_s * 1e3)),
        )
