"""Outlook based on the simulator: outcome of candidate sizes under the forecast load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from core.spec.schema import AutoscaleSpec, Spec
from core.trace.trace import TraceRequest
from core.trace.traffic import SeenRequest
from planner.autoscaler.answer_lengths import answer_lengths, tokens_so_far
from planner.autoscaler.arithmetic import demand_of
from planner.autoscaler.demand import Demand
from planner.autoscaler.forecast import LoadForecast, begin_of_the_same, forecast_load, trace_request, upcoming
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import Prediction
from planner.simulator.clock import Clock
from planner.simulator.fleet import Fleet
from planner.simulator.fleet_setup import FleetSetup
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import Profile
from planner.simulator.report import Report
from planner.simulator.run import feed

_HORIZON_S = 60.0  # simulated time, unless _MAX_OUTPUT is reached first
_MAX_OUTPUT = 100_000  # answer tokens per simulation, which takes a few seconds
_LASTING_S = 300.0  # assumed lifetime of a decision
_MIN_REQUESTS = 8
_OTHERS = 1 << 66  # greater than any id
_EVICTION = "lru"  # the learning policy needs more history than a simulated minute
_MAX_PAST = 200  # earlier requests whose prompts are cached when a simulation begins

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Fleets:
    """Simulator input that is common to all pool sizes."""

    setup: FleetSetup
    profile: Profile
    slo_ttft_s: float
    slo_itl_s: float

    @classmethod
    def of(cls, spec: Spec, rules: AutoscaleSpec, profile: Profile, *, block_size: int) -> Fleets:
        """Build the input from a spec. block_size: tokens per id of the trace."""
        setup = FleetSetup(
            num_prefill=1,
            num_decode=1,
            policy="cost",
            block_size=block_size,
            kv_tokens=profile.kv.pool_tokens,
            prefix_fetches=True,
            prefill_batch_tokens=spec.prefill.max_batch_tokens,
            decode_batch_tokens=spec.decode.max_batch_tokens,
            max_running=spec.decode.max_running,
            max_local_tokens=spec.router.max_local_prefill,
            checkpoint_tokens=spec.kv.checkpoint_tokens,
            waits_in_router=True,
        )
        return cls(setup=setup, profile=profile, slo_ttft_s=rules.slo_ttft_ms / 1e3, slo_itl_s=rules.slo_itl_ms / 1e3)


@dataclass(frozen=True, kw_only=True)
class _Present:
    """Initial state of every simulation. Its requests have negative numbers, which excludes them from the results."""

    cached: list[TraceRequest]  # requests whose prompts are cached
    running: list[tuple[TraceRequest, int]]  # requests with their tokens so far
    waiting: list[TraceRequest]  # requests without a first token

    @classmethod
    def of(cls, requests: Sequence[SeenRequest], answers: Sequence[int], now_s: float, *, first: int) -> _Present:
        """Build the state at now_s.

        answers: answer length of each request. first: index of the first replayed request; its prompt and later ones
        are not cached.
        """
        running, waiting = [], []
        so_far = tokens_so_far(requests, now_s=now_s)
        for i, (seen, length, done) in enumerate(zip(requests, answers, so_far, strict=True)):
            if seen.is_over:
                continue
            length = max(length, done + 1)
            request = trace_request(seen, number=-1 - i, arrival_s=0.0, num_tokens=seen.num_tokens, num_output=length)
            if done:
                running.append((request, done))
            else:
                waiting.append(request)
        cached = [
            trace_request(seen, number=-1 - i, arrival_s=0.0, num_tokens=seen.num_tokens, num_output=1)
            for i, seen in enumerate(requests[:first])
            if seen.ids is not None
        ]
        return cls(cached=cached[-_MAX_PAST:], running=running, waiting=waiting)


class SimulatedOutlook:
    """Implementation of Outlook by simulation. Each pair of sizes is simulated once per load."""

    def __init__(
        self, fleets: Fleets, trace: list[TraceRequest], trace_s: float, forecast: LoadForecast, now: _Present
    ) -> None:
        """trace: requests of the next trace_s seconds. now: initial state of the simulations."""
        self.forecast = forecast
        self._fleets = fleets
        self._trace, self._trace_s = trace, trace_s
        self._now = now
        self._hashes = PrefixHashes(fleets.setup.block_size, trace[0].tokens_per_id)
        self._predicted: dict[tuple[PoolSizes, float], Prediction] = {}

    @classmethod
    def of(
        cls, fleets: Fleets, requests: Sequence[SeenRequest], *, now_s: float, window_s: float, ahead_s: float
    ) -> SimulatedOutlook | None:
        """Build the outlook from recent traffic; None if there are too few requests in the last window_s.

        requests: in order of arrival. ahead_s: how far after now_s the load is forecast.
        """
        recent = [request for request in requests if request.arrival_s >= now_s - window_s]
        if len(recent) < _MIN_REQUESTS:
            return None
        # Lengths are learnt from all requests: those with prompts of one length class may be rare.
        all_answers = answer_lengths(requests, now_s=now_s)
        answers = all_answers[len(requests) - len(recent) :]
        first = begin_of_the_same(recent, now_s=now_s)
        forecast = forecast_load(
            recent,
            answers,
            begin_s=max(now_s - window_s, requests[0].arrival_s),
            shape_s=max(now_s - window_s, recent[first].arrival_s),
            now_s=now_s,
            ahead_s=ahead_s,
        )
        first = max(first, _affordable(answers))
        trace = upcoming(recent[first:], answers[first:], forecast)
        seconds = (now_s - recent[first].arrival_s) * forecast.pace
        present = _Present.of(requests, all_answers, now_s, first=len(requests) - len(recent) + first)
        times = _times(seconds, answers[first:])
        return cls(fleets, _again(trace, seconds, times), times * seconds, forecast, present)

    def demand(self, *, reuse_share: float) -> Demand:
        fleets = self._fleets
        return demand_of(self._trace, fleets.setup, fleets.profile, slo_itl_s=fleets.slo_itl_s, reuse_share=reuse_share)

    def predict(self, sizes: PoolSizes, *, load: float = 1.0) -> Prediction:
        if (key := (sizes, load)) not in self._predicted:
            self._predicted[key] = self._simulate(sizes, load)
        return self._predicted[key]

    def _simulate(self, sizes: PoolSizes, load: float) -> Prediction:
        fleets = self._fleets
        setup = replace(fleets.setup, num_prefill=sizes.prefill, num_decode=sizes.decode, eviction=_EVICTION)
        clock, report = Clock(), Report(slo_ttft_s=fleets.slo_ttft_s, slo_itl_s=fleets.slo_itl_s)
        fleet = Fleet(setup, fleets.profile, self._hashes, clock, report)
        fleet.warm(self._now.cached)
        for request, num_generated in self._now.running:
            fleet.place(request, num_generated)
        trace = [replace(request, arrival_s=request.arrival_s / load) for request in self._trace]
        feed(clock, fleet.arrive, [*self._now.waiting, *trace])
        clock.run()
        judged = [flight for flight in report.flights if flight.request.number >= 0]
        judged.sort(key=lambda flight: flight.request.arrival_s)
        ttft = np.array([flight.ttft_s for flight in judged])
        itl = np.array([flight.mean_itl_s for flight in judged])
        in_ttft, in_itl = ttft <= fleets.slo_ttft_s, itl <= fleets.slo_itl_s
        work_s = np.array([flight.compute_s for flight in judged if flight.option.prefill])
        simulated_s = max(self._trace_s / load, 1e-3)
        growth = _growth(work_s, sizes.prefill * simulated_s)
        if not self._now.waiting:
            growth = max(0.0, growth)  # no backlog to work off
        arrivals = np.array([flight.request.arrival_s for flight in judged])
        cached = sum(flight.num_cached for flight in judged) / sum(flight.request.num_tokens for flight in judged)
        return Prediction(
            sizes=sizes,
            load=load,
            num=len(judged),
            good_share=float(np.mean(in_ttft & in_itl)),
            lasting_share=_lasting(
                arrivals, ttft, in_itl, simulated_s=simulated_s, growth=growth, slo_ttft_s=fleets.slo_ttft_s
            ),
            ttft_share=float(np.mean(in_ttft)),
            itl_share=float(np.mean(in_itl)),
            ttft_p50_s=float(np.percentile(ttft, 50)),
            ttft_p90_s=float(np.percentile(ttft, 90)),
            itl_s=float(np.mean(itl[itl > 0])) if (itl > 0).any() else 0.0,
            reuse_share=min(1.0, cached),
        )


def _growth(work_s: Floats, capacity_s: float) -> float:
    """Return the growth of the prompt queue in seconds per second: work / capacity - 1; negative if it shrinks.

    Growth counts only beyond one standard deviation of the work, since a few long prompts may coincide by chance. The
    variance of a compound Poisson sum is the sum of its squares.
    """
    growth = float(work_s.sum()) / capacity_s - 1.0
    return growth if growth < 0 else max(0.0, growth - math.sqrt(float((work_s**2).sum())) / capacity_s)


def _lasting(
    arrivals: Floats, ttft: Floats, in_itl: Bools, *, simulated_s: float, growth: float, slo_ttft_s: float
) -> float:
    """Extrapolate the share of requests that keep both limits over _LASTING_S.

    After the simulated time, more requests like those of its last third follow, while the queue changes by `growth`
    seconds per second. One simulated minute would not reveal a queue that grows or shrinks slowly.
    """
    good = float(np.mean((ttft <= slo_ttft_s) & in_itl))
    if (left_s := _LASTING_S - simulated_s) <= 0:
        return good
    is_last = arrivals >= simulated_s * 2 / 3
    if not is_last.any():  # no arrivals in the last third: use all requests
        is_last[:] = True
    later_s = np.linspace(0.0, left_s, 16)[:, None]
    later = float(np.mean((ttft[is_last] + growth * later_s <= slo_ttft_s) & in_itl[is_last]))
    return (simulated_s * good + left_s * later) / _LASTING_S


def _affordable(answers: Sequence[int]) -> int:
    """Return the index of the first replayed request: as many of the last ones as _MAX_OUTPUT answer tokens allow."""
    left, first = _MAX_OUTPUT, len(answers)
    while first and (left := left - answers[first - 1]) >= 0:
        first -= 1
    return min(first, max(0, len(answers) - _MIN_REQUESTS))


def _times(seconds: float, answers: Sequence[int]) -> int:
    """Return how often a trace of this length is repeated to fill the simulated time."""
    return max(1, round(min(_HORIZON_S / max(seconds, 1e-3), _MAX_OUTPUT / sum(answers))))


def _again(trace: list[TraceRequest], seconds: float, times: int) -> list[TraceRequest]:
    """Repeat the trace, each time with new prompts.

    seconds: duration of the trace, including idle time at its end, so that a burst that has ended is not prolonged.
    """
    found = list(trace)
    for turn in range(1, times):
        found += [
            replace(
                request,
                number=request.number + turn * len(trace),
                arrival_s=request.arrival_s + turn * seconds,
                ids=request.ids and tuple(id + turn * _OTHERS for id in request.ids),
            )
            for request in trace
        ]
    return found
