"""What the simulator says of sizes that could be, for the load that is forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from cluster.bench.trace import TraceRequest
from cluster.words.traffic import SeenRequest
from router.autoscale.demand import Demand, demand_of
from router.autoscale.forecast import LoadForecast, answer_lengths, forecast_load, trace_request, upcoming
from router.autoscale.pool_sizes import PoolSizes
from router.autoscale.scaling_decision import Prediction
from router.simulator.clock import Clock
from router.simulator.fleet import Fleet, FleetSetup
from router.simulator.prefix_hashes import PrefixHashes
from router.simulator.profile import Profile
from router.simulator.report import Report
from router.simulator.run import feed

_WARM_SHARE = 0.25  # of the requests that are replayed: pools fill meanwhile, and nothing is judged
_MOST_OUTPUT = 150_000  # tokens of answers that one simulation generates: some seconds
_LEAST_REQUESTS = 8
_MOST_PAST = 2000  # requests before these, whose prompts are in the caches when a simulation begins


class Outlook(Protocol):
    """What is known of the time that is decided for."""

    forecast: LoadForecast

    def predict(self, sizes: PoolSizes, *, load: float = 1.0) -> Prediction:
        """load: so many times as many requests as are forecast."""
        ...

    def demand(self, *, reuse_share: float) -> Demand: ...


@dataclass(frozen=True, kw_only=True)
class Fleets:
    """What is the same whatever the sizes, for the simulator."""

    setup: FleetSetup
    profile: Profile
    slo_ttft_s: float
    slo_itl_s: float


class SimulatedOutlook:
    """Implements Outlook. Each pair of sizes is simulated once, whoever asks."""

    def __init__(
        self,
        fleets: Fleets,
        trace: list[TraceRequest],
        forecast: LoadForecast,
        *,
        past: list[TraceRequest],
        running: list[tuple[TraceRequest, int]],
    ) -> None:
        """trace: what is replayed. past: what came before, and may be cached. running: of that, what was being answered
        when the trace begins, and its tokens then."""
        self.forecast = forecast
        self._fleets = fleets
        self._past = past
        self._running = running
        self._trace = trace
        self._predicted: dict[tuple[PoolSizes, float], Prediction] = {}

    @classmethod
    def of(
        cls, fleets: Fleets, requests: Sequence[SeenRequest], *, now_s: float, window_s: float, ahead_s: float
    ) -> SimulatedOutlook | None:
        """From what was seen until now, in order of arrival; None where that is too little in the last window_s.

        ahead_s: for how long after now is decided.
        """
        recent = [request for request in requests if request.arrival_s >= now_s - window_s]
        if len(recent) < _LEAST_REQUESTS:
            return None
        begin_s = max(now_s - window_s, requests[0].arrival_s)
        answers = answer_lengths(recent)
        forecast = forecast_load(recent, answers, begin_s=begin_s, now_s=now_s, ahead_s=ahead_s)
        first = _affordable(answers)
        before = requests[: len(requests) - len(recent) + first][-_MOST_PAST:]
        past = [
            trace_request(seen, number=-1 - i, arrival_s=0.0, num_tokens=seen.num_tokens, num_output=1)
            for i, seen in enumerate(before)
            if seen.ids is not None
        ]
        running = [
            (trace_request(seen, number=-1 - i, arrival_s=0.0, num_tokens=seen.num_tokens, num_output=left), done)
            for i, seen in enumerate(before)
            if (left := seen.num_output or 0) > (done := _tokens_by(seen, recent[first].arrival_s)) > 0
        ]
        trace = upcoming(recent[first:], answers[first:], forecast)
        return cls(fleets, trace, forecast, past=past, running=running)

    @property
    def num_simulated(self) -> int:
        return len(self._predicted)

    def demand(self, *, reuse_share: float) -> Demand:
        fleets = self._fleets
        return demand_of(self._trace, fleets.setup, fleets.profile, slo_itl_s=fleets.slo_itl_s, reuse_share=reuse_share)

    def predict(self, sizes: PoolSizes, *, load: float = 1.0) -> Prediction:
        if (key := (sizes, load)) not in self._predicted:
            self._predicted[key] = self._simulate(sizes, load)
        return self._predicted[key]

    def _simulate(self, sizes: PoolSizes, load: float) -> Prediction:
        fleets = self._fleets
        setup = replace(fleets.setup, num_prefill=sizes.prefill, num_decode=sizes.decode)
        clock, report = Clock(), Report(slo_ttft_s=fleets.slo_ttft_s, slo_itl_s=fleets.slo_itl_s)
        hashes = PrefixHashes(setup.block_size, self._trace[0].tokens_per_id)
        fleet = Fleet(setup, fleets.profile, hashes, clock, report)
        fleet.warm(self._past)
        for request, num_generated in self._running:
            fleet.place(request, num_generated)
        feed(clock, fleet.arrive, [replace(request, arrival_s=request.arrival_s / load) for request in self._trace])
        clock.run()
        first = self._trace[int(len(self._trace) * _WARM_SHARE)].number
        judged = [flight for flight in report.flights if flight.request.number >= first]
        ttft = np.array([flight.ttft_s for flight in judged])
        itl = np.array([flight.mean_itl_s for flight in judged])
        in_ttft, in_itl = ttft <= fleets.slo_ttft_s, itl <= fleets.slo_itl_s
        cached = sum(flight.num_cached for flight in judged) / sum(flight.request.num_tokens for flight in judged)
        return Prediction(
            sizes=sizes,
            load=load,
            good_share=float(np.mean(in_ttft & in_itl)),
            ttft_share=float(np.mean(in_ttft)),
            itl_share=float(np.mean(in_itl)),
            ttft_p50_s=float(np.percentile(ttft, 50)),
            ttft_p90_s=float(np.percentile(ttft, 90)),
            itl_s=float(np.mean(itl[itl > 0])) if (itl > 0).any() else 0.0,
            reuse_share=min(1.0, cached),
        )


def _affordable(answers: Sequence[int]) -> int:
    """The first of the requests that are replayed: the last ones, as far as their answers can be afforded."""
    left, first = _MOST_OUTPUT, len(answers)
    while first and (left := left - answers[first - 1]) >= 0:
        first -= 1
    return min(first, max(0, len(answers) - _LEAST_REQUESTS))


def _tokens_by(seen: SeenRequest, when_s: float) -> int:
    """That a request which is over had by then."""
    if seen.ttft_s is None or not seen.itl_s:
        return 0
    return int((when_s - seen.arrival_s - seen.ttft_s) / seen.itl_s)
