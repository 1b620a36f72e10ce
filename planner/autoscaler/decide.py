"""Scaling decision of the autoscaler. Pure: (state, observation) -> (new state, decision).

One decision covers both pools. It scales up, or changes the split, as soon as the current sizes would miss the latency
limits under the forecast load, provided that the change saves more than it costs. It scales down only after several
consecutive decisions have found the smaller sizes enough for a fifth more than the forecast load. This margin gives
hysteresis. A premature scale-down doubles the stabilization window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from core.spec.schema import AutoscaleSpec
from planner.autoscaler.demand import Demand
from planner.autoscaler.observation import HOT, Observation, Saturation
from planner.autoscaler.outlook import Outlook
from planner.autoscaler.pool_sizes import PoolSizes, ScaleLimits, ScaleMoves
from planner.autoscaler.scaling_decision import Mode, Prediction, ScalingDecision
from planner.autoscaler.search import fewer, find_enough
from planner.autoscaler.simulator_accuracy import BAND, Trust

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
_COLD = 0.5  # measured load, in terms of the smaller pool, below which a pool may shrink


@dataclass(frozen=True, kw_only=True)
class AutoscaleState:
    """State carried from one decision to the next; plain values."""

    number: int = 0
    decided_s: float = 0.0  # time of the last decision
    changed_at: int = 0  # number of the last decision that changed something
    shrunk_at: int = -(10**9)  # number of the last scale-down
    calm: int = 0  # consecutive decisions that found smaller sizes enough
    calm_sizes: PoolSizes | None = None  # maximum of the sizes that they found
    patience: int = 1  # multiple of _CALM
    expected: Prediction | None = None  # prediction for the current sizes, made at the last decision
    correction: float = 1.0  # factor on the forecast load; above 1 after unexpected SLO misses
    trust: Trust = field(default_factory=Trust)


@dataclass(frozen=True, kw_only=True)
class _Choice:
    after: PoolSizes
    mode: Mode
    reason: str
    tried: tuple[Prediction, ...] = ()
    worth_s: float = 0.0
    price_s: float = 0.0


class Autoscaler:
    """Scaling rules without state: `decide` is a function of its arguments."""

    def __init__(self, spec: AutoscaleSpec, limits: ScaleLimits) -> None:
        self.spec = spec
        self.limits = limits
        self.slo = {"slo_ttft_s": spec.slo_ttft_ms / 1e3, "slo_itl_s": spec.slo_itl_ms / 1e3}

    def decide(
        self, state: AutoscaleState, seen: Observation, outlook: Callable[[], Outlook | None]
    ) -> tuple[AutoscaleState, ScalingDecision]:
        """Decide on the pool sizes. Return the new state and the decision.

        outlook: builds the outlook on demand; it returns None if there is too little traffic to predict anything.
        """
        measured = seen.measured(since_s=state.decided_s, **self.slo)
        state = replace(state, number=state.number + 1, decided_s=seen.now_s)
        if state.expected and state.expected.sizes == seen.sizes and not seen.is_changing:
            state = replace(
                state,
                trust=state.trust.after(state.expected, measured, **self.slo),
                correction=self._corrected(state, state.expected, measured),
            )
        state, choice, ahead = self._choose(replace(state, expected=None), seen, outlook)
        moves = ScaleMoves.between(seen.sizes, choice.after, has_switch=seen.price.switch_s is not None)
        decision = ScalingDecision(
            number=state.number,
            time_s=seen.now_s,
            before=seen.sizes,
            after=choice.after,
            mode=choice.mode,
            reason=choice.reason,
            moves=moves,
            load=str(ahead.forecast) if ahead else "",
            rate=ahead.forecast.rate if ahead else 0.0,
            tried=choice.tried,
            measured=measured if measured["num"] else None,
            worth_s=choice.worth_s,
            price_s=choice.price_s,
            is_dry_run=self.spec.dry_run,
        )
        return self._after(state, decision), decision

    def _choose(
        self, state: AutoscaleState, seen: Observation, outlook: Callable[[], Outlook | None]
    ) -> tuple[AutoscaleState, _Choice, Outlook | None]:
        if not self.limits.allow(seen.sizes):
            after = self.limits.nearest(*seen.sizes)
            return state, _Choice(after=after, mode="limits", reason=f"{seen.sizes} is outside the limits"), None
        if (ahead := outlook()) is None:
            least = self.limits.least
            state, choice = self._shrink(state, seen, least, "idle", "there was hardly any traffic", ())
            return state, choice, None
        if not state.trust.is_trusted:
            # Measurements do not reflect a change in progress.
            if seen.is_changing:
                return state, _stay(seen, "waiting", "an earlier change is still in progress"), ahead
            now = ahead.predict(seen.sizes)
            state, choice = self._by_saturation(replace(state, expected=now), seen, seen.saturation)
            return state, choice, ahead
        state, choice = self._by_simulator(state, seen, ahead)
        return state, choice, ahead

    def _by_simulator(self, state: AutoscaleState, seen: Observation, ahead: Outlook) -> tuple[AutoscaleState, _Choice]:
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
                    return self._shrink(state, seen, sizes, "simulator", why, tuple(tried))
            state = replace(state, calm=0, calm_sizes=None)
            return state, _stay(seen, "simulator", f"{_good(now)}, and no smaller sizes are enough", tuple(tried))
        state = replace(state, calm=0, calm_sizes=None)
        best, tried = find_enough(
            ahead, self.limits, demand, seen.sizes, load=round(load * _MORE_LOAD, 3), attainment=self.spec.attainment
        )
        return state, self._worth_it(seen, ahead, demand.times(load), now, best, (now, *tried))

    def _worth_it(
        self,
        seen: Observation,
        ahead: Outlook,
        demand: Demand,
        now: Prediction,
        best: Prediction,
        tried: tuple[Prediction, ...],
    ) -> _Choice:
        """Choose the best sizes if they save more than the change costs, else stay.

        Savings are counted in requests that keep the limits or, under overload, in work done.
        """
        after = self._keep_surplus(seen.sizes, best.sizes, demand)
        if after == seen.sizes:
            return _stay(seen, "simulator", f"only {_good(now)}, and no allowed sizes would do better", tried)
        then = best
        # `best` was simulated under more load than `now`, so compare both under the same load.
        if best.expected_share < self.spec.attainment:
            then = ahead.predict(best.sizes, load=now.load)
            tried = (*tried, then)
        moves = ScaleMoves.between(seen.sizes, after, has_switch=seen.price.switch_s is not None)
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
            return replace(_stay(seen, "simulator", f"{text}: not {costs}", tried), worth_s=worth_s, price_s=price_s)
        return _Choice(
            after=after,
            mode="simulator",
            reason=f"{text}: {costs}",
            tried=tried,
            worth_s=worth_s,
            price_s=price_s,
        )

    def _keep_surplus(self, now: PoolSizes, target: PoolSizes, demand: Demand) -> PoolSizes:
        """Return the target sizes, with surplus devices given to the pool that needs them most.

        Devices are not released here, because that takes several decisions in a row (see `_shrink`).
        """
        if now.prefill >= target.prefill and now.decode >= target.decode:
            return now
        num_devices = max(self.limits.num_devices(now), self.limits.num_devices(target))
        return self.limits.evenly(*demand.replicas, num_devices=num_devices, at_least=target)

    def _shrink(
        self,
        state: AutoscaleState,
        seen: Observation,
        sizes: PoolSizes,
        mode: Mode,
        why: str,
        tried: tuple[Prediction, ...],
    ) -> tuple[AutoscaleState, _Choice]:
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
            return state, _stay(seen, mode, f"{why}: seen {state.calm} of {needed} times in a row", tried)
        state = replace(state, calm=0, calm_sizes=None, shrunk_at=state.number)
        return state, _Choice(after=most, mode=mode, reason=f"{why}, {needed} times in a row", tried=tried)

    def _by_saturation(
        self, state: AutoscaleState, seen: Observation, use: Saturation
    ) -> tuple[AutoscaleState, _Choice]:
        """Change one replica at a time, by the measured load."""
        x, y = seen.sizes
        why = (
            f"the simulator was off by more than a factor of {BAND:g} (now {state.trust}), so measured load decides: "
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
            state = replace(state, calm=0, calm_sizes=None)
            return state, _Choice(after=allowed[0], mode="saturation", reason=why)
        less = [PoolSizes(x - 1, y)] if use.prefill * x < _COLD * (x - 1) else []
        less += [PoolSizes(x, y - 1)] if use.decode * y < _COLD * (y - 1) else []
        if not more and (allowed := [sizes for sizes in less if self.limits.allow(sizes)]):
            return self._shrink(state, seen, allowed[0], "saturation", why, ())
        state = replace(state, calm=0, calm_sizes=None)
        return state, _stay(seen, "saturation", why)

    def _corrected(self, state: AutoscaleState, expected: Prediction, measured: Mapping[str, float]) -> float:
        """Return the updated load correction; it rises if requests missed limits that the simulator predicted kept."""
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


def _stay(seen: Observation, mode: Mode, reason: str, tried: tuple[Prediction, ...] = ()) -> _Choice:
    return _Choice(after=seen.sizes, mode=mode, reason=reason, tried=tried)


def _good(now: Prediction) -> str:
    return f"{now.expected_share:.1%} of the requests keep the limits on {now.sizes}"
