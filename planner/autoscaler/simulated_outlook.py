"""Outlook based on the simulator: outcome of candidate sizes under the forecast load."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.spec.schema import AutoscaleSpec, Spec
from core.trace.trace import TraceRequest
from core.trace.traffic import SeenRequest, Slo
from core.types.errors import SpecError
from planner.autoscaler.forecast import (
    answer_lengths,
    begin_of_the_same,
    forecast_load,
    tokens_so_far,
    trace_request,
    upcoming,
)
from planner.autoscaler.pool_sizes import Demand, PoolSizes
from planner.autoscaler.scaling_decision import Prediction
from planner.simulator.fleet import Fleet
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import FleetSetup, Profile
from planner.simulator.run import simulate

WINDOW_S = 180.0  # traffic that a decision is based on
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
    slo: Slo

    @classmethod
    def of(cls, spec: Spec, rules: AutoscaleSpec, profile: Profile, *, block_size: int) -> Fleets:
        """Build the input from a spec. block_size: tokens per id of the trace."""
        kv_tokens = profile.kv.pool_tokens
        setup = FleetSetup.of(
            spec, block_size=block_size, kv_tokens=kv_tokens, prefix_fetches=True, waits_in_router=True
        )
        return cls(setup=setup, profile=profile, slo=Slo.of_ms(rules.slo_ttft_ms, rules.slo_itl_ms))

    def with_sizes(self, sizes: PoolSizes) -> FleetSetup:
        return replace(self.setup, num_prefill=sizes.prefill, num_decode=sizes.decode)

    def simulate(self, sizes: PoolSizes, trace: Sequence[TraceRequest]) -> dict[str, Any]:
        """Simulate a trace on pools of these sizes, and return the simulator's report."""
        return simulate(self.with_sizes(sizes), self.profile, trace, self.slo)


class SimulatedOutlook:
    """Implementation of Outlook by simulation. Each pair of sizes is simulated once per load.

    Requests that are running, waiting or cached when the simulations begin have negative numbers, which excludes them
    from the results.
    """

    def __init__(self, fleets: Fleets, requests: Sequence[SeenRequest], *, now_s: float, ahead_s: float) -> None:
        """Build the outlook from recent traffic.

        requests: in order of arrival, at least _MIN_REQUESTS of them in the last WINDOW_S. ahead_s: how far after now_s
        the load is forecast.
        """
        num_past = bisect_left(requests, now_s - WINDOW_S, key=lambda request: request.arrival_s)
        recent = requests[num_past:]
        # Lengths are learnt from all requests: those with prompts of one length class may be rare.
        all_answers = answer_lengths(requests, now_s=now_s)
        answers = all_answers[num_past:]
        first = begin_of_the_same(recent, now_s=now_s)
        self.forecast = forecast_load(
            recent,
            answers,
            begin_s=max(now_s - WINDOW_S, requests[0].arrival_s),
            first=first,
            now_s=now_s,
            ahead_s=ahead_s,
        )
        first = max(first, _affordable(answers))
        trace = upcoming(recent[first:], answers[first:], self.forecast)
        seconds = (now_s - recent[first].arrival_s) * self.forecast.pace
        times = _times(seconds, answers[first:])
        self._fleets = fleets
        self._trace, self._trace_s = _again(trace, seconds, times), times * seconds
        self._hashes = PrefixHashes(fleets.setup.block_size, trace[0].tokens_per_id)
        self._predicted: dict[tuple[PoolSizes, float], Prediction] = {}
        # The state at now_s. The prompts of replayed requests are not cached.
        past = [_present(i, seen, 1) for i, seen in enumerate(requests[: num_past + first]) if seen.ids is not None]
        self._cached = past[-_MAX_PAST:]
        self._running: list[tuple[TraceRequest, int]] = []  # requests with their tokens so far
        self._waiting: list[TraceRequest] = []  # requests without a first token
        so_far = tokens_so_far(requests, now_s=now_s)
        for i, (seen, length, done) in enumerate(zip(requests, all_answers, so_far, strict=True)):
            if seen.is_over:
                continue
            request = _present(i, seen, max(length, done + 1))
            if done:
                self._running.append((request, done))
            else:
                self._waiting.append(request)

    @classmethod
    def of(
        cls, fleets: Fleets, requests: Sequence[SeenRequest], *, now_s: float, ahead_s: float
    ) -> SimulatedOutlook | None:
        """Build the outlook; None if there are too few requests in the last WINDOW_S."""
        num_recent = sum(request.arrival_s >= now_s - WINDOW_S for request in requests)
        return cls(fleets, requests, now_s=now_s, ahead_s=ahead_s) if num_recent >= _MIN_REQUESTS else None

    def demand(self, *, reuse_share: float) -> Demand:
        return demand_of(self._trace, self._fleets, reuse_share=reuse_share)

    def predict(self, sizes: PoolSizes, *, load: float = 1.0) -> Prediction:
        if (key := (sizes, load)) not in self._predicted:
            self._predicted[key] = self._simulate(sizes, load)
        return self._predicted[key]

    def _simulate(self, sizes: PoolSizes, load: float) -> Prediction:
        fleets = self._fleets
        fleet = Fleet(replace(fleets.with_sizes(sizes), eviction=_EVICTION), fleets.profile, self._hashes)
        fleet.warm(self._cached)
        for request, num_generated in self._running:
            fleet.place(request, num_generated)
        trace = [replace(request, arrival_s=request.arrival_s / load) for request in self._trace]
        fleet.run([*self._waiting, *trace])
        judged = [flight for flight in fleet.flights if flight.request.number >= 0 and flight.ended_at]
        if not judged:
            raise SpecError(f"no recent prompt fits a KV pool of {fleets.setup.kv_tokens} tokens")
        judged.sort(key=lambda flight: (flight.request.arrival_s, flight.ended_at))
        ttft = np.array([flight.ttft_s for flight in judged])
        itl = np.array([flight.mean_itl_s for flight in judged])
        in_ttft, in_itl = ttft <= fleets.slo.ttft_s, itl <= fleets.slo.itl_s
        work_s = np.array([flight.compute_s for flight in judged if flight.option.prefill])
        simulated_s = max(self._trace_s / load, 1e-3)
        growth = _growth(work_s, sizes.prefill * simulated_s)
        if not self._waiting:
            growth = max(0.0, growth)  # no backlog to work off
        arrivals = np.array([flight.request.arrival_s for flight in judged])
        cached = sum(flight.num_cached for flight in judged) / sum(flight.request.num_tokens for flight in judged)
        return Prediction(
            sizes=sizes,
            load=load,
            num=len(judged),
            good_share=float(np.mean(in_ttft & in_itl)),
            lasting_share=_lasting(
                arrivals, ttft, in_itl, simulated_s=simulated_s, growth=growth, slo_ttft_s=fleets.slo.ttft_s
            ),
            ttft_share=float(np.mean(in_ttft)),
            itl_share=float(np.mean(in_itl)),
            ttft_p50_s=float(np.percentile(ttft, 50)),
            ttft_p90_s=float(np.percentile(ttft, 90)),
            itl_s=float(np.mean(itl[itl > 0])) if (itl > 0).any() else 0.0,
            reuse_share=min(1.0, cached),
        )


def demand_of(trace: Sequence[TraceRequest], fleets: Fleets, *, reuse_share: float) -> Demand:
    """Compute the demand of a trace of at least two requests without queues, caches or randomness.

    It gives the search a starting point and ranks sizes by their spare capacity. The simulator decides what is enough.
    reuse_share: share of prompt tokens found in caches.
    """
    seconds, timing = max(trace[-1].arrival_s, 1e-9), fleets.profile.timing()
    computed = sum(
        timing.prefill_s(
            max(1, round(request.num_tokens * (1 - reuse_share))),
            after=round(request.num_tokens * reuse_share),
            chunk=fleets.setup.prefill_batch_tokens,
        )
        for request in trace
    )
    mean_context = fmean(request.num_tokens + request.num_output / 2 for request in trace)
    tokens_per_s = sum(request.num_output for request in trace) / seconds
    return Demand(prefill=computed / seconds, decode=tokens_per_s / _decode_tokens_per_s(fleets, mean_context))


def _decode_tokens_per_s(fleets: Fleets, mean_context: float) -> float:
    """Return the token rate of one replica with the largest batch that keeps the ITL limit and fits its memory."""
    setup, profile = fleets.setup, fleets.profile
    timing = profile.decode_timing()
    row_s = max(timing.token_s + timing.context_s * mean_context, 1e-9)
    rows = min((fleets.slo.itl_s - timing.base_s) / row_s, setup.max_running, setup.kv_tokens / mean_context)
    if (kv := profile.kv).window or kv.state_bytes:
        size, largest, context = setup.block_size, setup.decode_batch_tokens, math.ceil(mean_context)
        pool = kv.pool_sizes(setup.kv_tokens, block_size=size, max_batch_tokens=largest)
        rows = min(rows, pool.max_batch(kv.wire_cache(size), context, max_batch_tokens=largest))
    rows = max(rows, 1.0)
    return rows / (timing.base_s + rows * row_s)


def _present(number: int, seen: SeenRequest, num_output: int) -> TraceRequest:
    """Return a request that had arrived before the simulation."""
    return trace_request(seen, number=-1 - number, arrival_s=0.0, num_tokens=seen.num_tokens, num_output=num_output)


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
    """Return the index of the first request to replay: as many of the last ones as fit _MAX_OUTPUT answer tokens."""
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
