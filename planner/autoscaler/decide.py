"""Scaling decision of the autoscaler. Pure: (state, observation) -> (new state, decision).

One decision covers both pools. It scales up, or changes the split, as soon as the current sizes would miss the latency
limits under the forecast load, provided that the change saves more than it costs. It scales down only after several
consecutive decisions have found the smaller sizes enough for a fifth more than the forecast load. This margin gives
hysteresis. A premature scale-down doubles the stabilization window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.spec.schema import AutoscaleSpec
from core.trace.traffic import Slo
from planner.autoscaler.observation import HOT, Observation
from planner.autoscaler.pool_sizes import Demand, PoolSizes, ScaleLimits
from planner.autoscaler.scaling_decision import Mode, Prediction, ScalingDecision
from planner.autoscaler.search import Outlook, fewer, find_enough

_MORE_LOAD = 1.1  # load, relative to the forecast, for which larger sizes are chosen
_SPARE_LOAD = 1.2  # load, relative to the forecast, that smaller sizes must carry
_CALM = 3  # consecutive decisions before a scale-down
_MAX_PATIENCE = 16  # maximum multiple of _CALM
_REGRET = 20  # decisions: a scale-up within this time marks the scale-down as premature
_MIN_GAIN = 0.02  # minimum gain, in share of good requests
# A gain below _CHANCE / sqrt(n), at most two standard errors of a share of n simulated requests, may be noise.
_CHANCE = 1.0
_HOPELESS = 0.5  # share of good requests below which the load exceeds the capacity
_HORIZON = 10  # assumed lifetime of a change, in decisions
_WORSE, _BETTER, _MAX_CORRECTION = 1.1, 0.98, 1.5  # factors on the load given to the simulator
_MIN_MEASURED = 20  # requests
_COLD = 0.5  # measured load that the smaller pool would have; only below this may a pool shrink
# Trust in the simulator.
_BAND = 2.0  # accepted factor between prediction and measurement, for median TTFT and mean ITL
_NEW = 0.4  # weight of one comparison
_PATIENCE = 3  # consecutive comparisons that change the verdict
_ENOUGH = 10  # requests for a full comparison; fewer cannot end trust, and restore it more slowly
_SMALL = 0.25  # fraction of a limit below which latencies count as equal, since they change no decision


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Trust in the simulator. Immutable: `after` returns the trust after one more comparison."""

    ttft_log: float = 0.0  # smoothed log(measured / predicted)
    itl_log: float = 0.0
    streak: int = 0  # consecutive comparisons that contradict is_trusted
    is_trusted: bool = True

    def after(self, predicted: Prediction, measured: Mapping[str, float], slo: Slo) -> Trust:
        """Return the trust after one comparison.

        measured: num, ttft_p50_s and itl_s (see ScalingDecision), under the predicted sizes.
        """
        if measured["num"] < (_ENOUGH if self.is_trusted else 1):
            return self
        weight = _NEW * min(1.0, measured["num"] / _ENOUGH)
        ttft_log = _log_ratio(measured["ttft_p50_s"], predicted.ttft_p50_s, at_least=_SMALL * slo.ttft_s)
        itl_log = _log_ratio(measured["itl_s"], predicted.itl_s, at_least=_SMALL * slo.itl_s)
        new = replace(
            self,
            ttft_log=self.ttft_log + weight * (ttft_log - self.ttft_log),
            itl_log=self.itl_log + weight * (itl_log - self.itl_log),
        )
        is_within = max(abs(new.ttft_log), abs(new.itl_log)) <= math.log(_BAND)
        if is_within is self.is_trusted:
            return replace(new, streak=0)
        if self.streak + 1 < _PATIENCE:
            return replace(new, streak=self.streak + 1)
        return replace(new, streak=0, is_trusted=is_within)

    def __str__(self) -> str:
        return f"measured / predicted: TTFT {math.exp(self.ttft_log):.2f}, ITL {math.exp(self.itl_log):.2f}"


@dataclass(frozen=True, kw_only=True)
class AutoscaleState:
    """State carried from one decision to the next; plain values."""

    number: int = 0
    decided_s: float = 0.0  # time of the last decision
    changed_at: int = 0  # number of the last decision that changed something
    shrunk_at: int = -(10**9)  # number of the last scale-down
    calm: int = 0  # consecutive decisions that found smaller sizes enough
    calm_sizes: PoolSizes | None = None  # maximum of the sizes that these decisions found
    patience: int = 1  # multiple of _CALM
    expected: Prediction | None = None  # prediction for the current sizes, made at the last decision
    correction: float = 1.0  # factor on the forecast load; above 1 after unexpected SLO misses
    trust: Trust = field(default_factory=Trust)


Decided = tuple[AutoscaleState, ScalingDecision]  # new state, decision


class Autoscaler:
    """Scaling rules without state: `decide` is a function of its arguments."""

    def __init__(self, spec: AutoscaleSpec, *, devices: PoolSizes) -> None:
        """devices: devices per replica of each pool."""
        self.spec = spec
        self.limits = ScaleLimits.of(spec, devices=devices)
        self._slo = Slo.of_ms(spec.slo_ttft_ms, spec.slo_itl_ms)

    def decide(self, state: AutoscaleState, seen: Observation, outlook: Callable[[], Outlook | None]) -> Decided:
        """Decide on the pool sizes.

        outlook: builds the outlook on demand; it returns None if there is too little traffic to predict anything.
        """
        measured = seen.measured(self._slo, since_s=state.decided_s)
        state = replace(state, number=state.number + 1, decided_s=seen.now_s)
        if state.expected and state.expected.sizes == seen.sizes and not seen.is_changing:
            state = replace(
                state,
                trust=state.trust.after(state.expected, measured, self._slo),
                correction=self._corrected(state, state.expected, measured),
            )
        state, decision, ahead = self._choose(replace(state, expected=None), seen, outlook)
        decision = replace(
            decision,
            number=state.number,
            moves=seen.moves_to(decision.after),
            load=str(ahead.forecast) if ahead else "",
            rate=ahead.forecast.ahead.rate if ahead else 0.0,
            measured=measured if measured["num"] else None,
            is_dry_run=self.spec.dry_run,
        )
        return self._after(state, decision), decision

    def _choose(
        self, state: AutoscaleState, seen: Observation, outlook: Callable[[], Outlook | None]
    ) -> tuple[AutoscaleState, ScalingDecision, Outlook | None]:
        if not self.limits.allow(seen.sizes):
            after = self.limits.nearest(*seen.sizes)
            return state, _decision(seen, "limits", f"{seen.sizes} is outside the limits", after), None
        if (ahead := outlook()) is None:
            return *self._shrink(state, seen, self.limits.least, "idle", "there was hardly any traffic"), None
        if state.trust.is_trusted:
            return *self._by_simulator(state, seen, ahead), ahead
        # Measurements do not reflect a change in progress.
        if seen.is_changing:
            return state, _decision(seen, "waiting", "an earlier change is still in progress"), ahead
        return *self._by_saturation(replace(state, expected=ahead.predict(seen.sizes)), seen), ahead

    def _by_simulator(self, state: AutoscaleState, seen: Observation, ahead: Outlook) -> Decided:
        load = state.correction
        now = ahead.predict(seen.sizes, load=load)
        state = replace(state, expected=now)
        demand = ahead.demand(reuse_share=now.reuse_share)
        if now.expected_share >= self.spec.attainment:
            tried = [now]
            spare = round(load * _SPARE_LOAD, 3)
            for sizes in fewer(seen.sizes, self.limits, demand, load=spare):
                tried.append(ahead.predict(sizes, load=spare))
                if tried[-1].expected_share >= self.spec.attainment:
                    why = f"{sizes} keeps the limits for {tried[-1].expected_share:.1%} of {spare:.0%} of the load"
                    return self._shrink(state, seen, sizes, "simulator", why, tried)
            reason = f"{_good(now)}, and no smaller sizes are enough"
            return _not_calm(state), _decision(seen, "simulator", reason, tried=tried)
        best, tried = find_enough(
            ahead, self.limits, demand, seen.sizes, load=round(load * _MORE_LOAD, 3), attainment=self.spec.attainment
        )
        return _not_calm(state), self._worth_it(seen, ahead, demand.times(load), now, best, [now, *tried])

    def _worth_it(
        self,
        seen: Observation,
        ahead: Outlook,
        demand: Demand,
        now: Prediction,
        best: Prediction,
        tried: list[Prediction],
    ) -> ScalingDecision:
        """Choose the best sizes if they save more than the change costs, else stay.

        Savings are counted in requests that keep the limits or, under overload, in work done.
        """
        after = self._keep_surplus(seen.sizes, best.sizes, demand)
        if after == seen.sizes:
            reason = f"only {_good(now)}, and no allowed sizes would do better"
            return _decision(seen, "simulator", reason, tried=tried)
        then = best
        # `best` was simulated under more load than `now`, so compare both under the same load.
        if best.expected_share < self.spec.attainment:
            then = ahead.predict(best.sizes, load=now.load)
            tried = [*tried, then]
        moves = seen.moves_to(after)
        delay_s = seen.price.delay_s(moves)
        today, hoped = now.expected_share, then.expected_share
        gain, least = hoped - today, max(_MIN_GAIN, _CHANCE / math.sqrt(now.num) if now.num else 0.0)
        text = f"{now.sizes} would keep the limits for {today:.1%}, {best.sizes} for {hoped:.1%}"
        # Under overload, chance decides which requests are good, so compare the work done instead.
        if max(today, hoped) < _HOPELESS:
            gain, least = demand.done(best.sizes) - demand.done(now.sizes), _MIN_GAIN
            text += f" (of the work {demand.done(now.sizes):.0%} and {demand.done(best.sizes):.0%})"
        worth_s = gain * _HORIZON * self.spec.interval_s
        price_s = seen.price.lost_s(moves) / sum(seen.sizes)
        costs = f"worth {worth_s:.0f} s of all requests, for {price_s:.1f} s, in {delay_s:.0f} s"
        if gain < least or worth_s <= price_s:
            decision = _decision(seen, "simulator", f"{text}: not {costs}", tried=tried)
        else:
            decision = _decision(seen, "simulator", f"{text}: {costs}", after, tried)
        return replace(decision, worth_s=worth_s, price_s=price_s)

    def _keep_surplus(self, now: PoolSizes, target: PoolSizes, demand: Demand) -> PoolSizes:
        """Return the target sizes, with surplus devices given to the pool that needs them most.

        Devices are not released here, because that takes several decisions in a row (see `_shrink`).
        """
        if now.prefill >= target.prefill and now.decode >= target.decode:
            return now
        num_devices = max(self.limits.num_devices(now), self.limits.num_devices(target))
        return self.limits.evenly(*demand, num_devices=num_devices, at_least=target)

    def _shrink(
        self,
        state: AutoscaleState,
        seen: Observation,
        sizes: PoolSizes,
        mode: Mode,
        why: str,
        tried: Sequence[Prediction] = (),
    ) -> Decided:
        """Scale down after enough calm decisions in a row, to the maximum of the sizes that they found."""
        most = state.calm_sizes or sizes
        most = PoolSizes(max(most.prefill, sizes.prefill), max(most.decode, sizes.decode))
        state = replace(state, calm=state.calm + 1, calm_sizes=most)
        # The decisions alternated between the pools, so their maximum is no scale-down: start over.
        if most.prefill >= seen.sizes.prefill and most.decode >= seen.sizes.decode:
            state, most = replace(state, calm=1, calm_sizes=sizes), sizes
        most = PoolSizes(min(most.prefill, seen.sizes.prefill), min(most.decode, seen.sizes.decode))
        back_s = max(seen.price.start_prefill_s, seen.price.start_decode_s)
        needed = max(_CALM, round(2 * back_s / self.spec.interval_s)) * state.patience
        if state.calm < needed:
            reason = f"{why}: seen {state.calm} of {needed} times in a row"
            return state, _decision(seen, mode, reason, tried=tried)
        state = replace(_not_calm(state), shrunk_at=state.number)
        return state, _decision(seen, mode, f"{why}, {needed} times in a row", most, tried)

    def _by_saturation(self, state: AutoscaleState, seen: Observation) -> Decided:
        """Change one replica at a time, by the measured load."""
        (x, y), use = seen.sizes, seen.saturation
        why = (
            f"the simulator was off by more than a factor of {_BAND:g} (now {state.trust}), so measured load decides: "
            f"prefill {use.prefill:.0%} full, decode {use.decode:.0%}"
        )
        more: list[PoolSizes] = []
        if use.prefill > HOT:
            more += [PoolSizes(x + 1, y)]
        if use.decode > HOT:
            more += [PoolSizes(x, y + 1)]
        others = (PoolSizes(x + 1, y - 1), PoolSizes(x - 1, y + 1))
        more += [sizes for sizes in others if use.relieved(seen.sizes, sizes)]
        if allowed := [sizes for sizes in more if self.limits.allow(sizes)]:
            return _not_calm(state), _decision(seen, "saturation", why, allowed[0])
        less = [PoolSizes(x - 1, y)] if use.prefill * x < _COLD * (x - 1) else []
        less += [PoolSizes(x, y - 1)] if use.decode * y < _COLD * (y - 1) else []
        if not more and (allowed := [sizes for sizes in less if self.limits.allow(sizes)]):
            return self._shrink(state, seen, allowed[0], "saturation", why)
        return _not_calm(state), _decision(seen, "saturation", why)

    def _corrected(self, state: AutoscaleState, expected: Prediction, measured: Mapping[str, float]) -> float:
        """Return the updated load correction; it rises if requests missed limits against the simulator's prediction."""
        if measured["num"] < _MIN_MEASURED:
            return state.correction
        if measured["good_share"] >= self.spec.attainment:
            return max(1.0, round(state.correction * _BETTER, 3))
        if expected.good_share < self.spec.attainment:
            return state.correction
        return min(_MAX_CORRECTION, round(state.correction * _WORSE, 3))

    def _after(self, state: AutoscaleState, decision: ScalingDecision) -> AutoscaleState:
        """Return the state after a decision."""
        if not decision.is_change:
            quiet = state.number - state.changed_at
            if state.patience > 1 and quiet >= 2 * _REGRET * state.patience:
                return replace(state, patience=state.patience // 2, changed_at=state.number)
            return state
        grows = sum(decision.after) > sum(decision.before)
        if grows and state.number - state.shrunk_at <= _REGRET * state.patience:
            state = replace(state, patience=min(2 * state.patience, _MAX_PATIENCE))
        return replace(state, changed_at=state.number)


def _decision(
    seen: Observation, mode: Mode, reason: str, after: PoolSizes | None = None, tried: Sequence[Prediction] = ()
) -> ScalingDecision:
    """Return the decision without the parts that `decide` adds. after: None: nothing changes."""
    return ScalingDecision(
        time_s=seen.now_s, before=seen.sizes, after=after or seen.sizes, mode=mode, reason=reason, tried=tuple(tried)
    )


def _not_calm(state: AutoscaleState) -> AutoscaleState:
    return replace(state, calm=0, calm_sizes=None)


def _good(now: Prediction) -> str:
    return f"{now.expected_share:.1%} of the requests keep the limits on {now.sizes}"


def _log_ratio(measured: float, predicted: float, *, at_least: float) -> float:
    return math.log(max(measured, at_least) / max(predicted, at_least))
