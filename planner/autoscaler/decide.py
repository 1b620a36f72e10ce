"""The autoscaler's choice, pure: what was decided before and what is seen now, to a decision and what is to be kept.

One decision for both pools. More, or another split, as soon as the sizes of today would not keep the limits under the
load that is forecast, where that saves more seconds of requests than the change costs. Less only where several
decisions in a row have found it enough for a fifth more load than is forecast; so what is enough to go down is more
than enough to stay. Whoever had to come back up waits twice as long the next time.
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

_MORE_LOAD = 1.1  # than is forecast, that new sizes should carry
_SPARE_LOAD = 1.2  # and smaller ones
_CALM = 3  # decisions in a row
_MOST_PATIENCE = 16  # times _CALM
_REGRET = 20  # decisions: whoever comes back up within so many was too quick
_LEAST_GAIN = 0.02  # of the requests
_CHANCE = (
    1.0  # of / sqrt(n): two standard errors at most of a share of n that were simulated; a smaller gain may be none
)
_HOPELESS = 0.5  # of the requests: where fewer are good there is more to do than can be done
_HORIZON = 10  # decisions: for so long a change is made, as far as anybody knows
_WORSE, _BETTER, _MOST_CORRECTION = 1.1, 0.98, 1.5  # of the load that the simulator is asked with
_LEAST_MEASURED = 20  # requests
_COLD = 0.5  # of what a pool has, as measured


@dataclass(frozen=True, kw_only=True)
class AutoscaleState:
    """What is kept from one decision to the next; plain values."""

    number: int = 0
    decided_s: float = 0.0  # the last one
    changed_at: int = 0  # decision: the last change of any kind
    shrunk_at: int = -(10**9)
    calm: int = 0  # decisions in a row that found less to be enough
    calm_sizes: PoolSizes | None = None  # the most of what they found
    patience: int = 1  # times _CALM
    expected: Prediction | None = None  # of the sizes that there are now, since the last decision
    correction: float = 1.0  # times the load that is forecast: more where limits were missed that should have been kept
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
    """The rules, without any state: `decide` is a function of its arguments."""

    def __init__(self, spec: AutoscaleSpec, limits: ScaleLimits) -> None:
        self.spec = spec
        self.limits = limits
        self.slo = {"slo_ttft_s": spec.slo_ttft_ms / 1e3, "slo_itl_s": spec.slo_itl_ms / 1e3}

    def decide(
        self, state: AutoscaleState, seen: Observation, outlook: Callable[[], Outlook | None]
    ) -> tuple[AutoscaleState, ScalingDecision]:
        """outlook: made when it is needed; None: too little was seen to say anything."""
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
            return state, _Choice(after=after, mode="limits", reason=f"{seen.sizes} is outside of the limits"), None
        if (ahead := outlook()) is None:
            least = self.limits.least
            state, choice = self._shrink(state, seen, least, "idle", "hardly anything was asked for", ())
            return state, choice, None
        if not state.trust.is_trusted:  # what is measured has not seen a change that is under way
            if seen.is_changing:
                return state, _stay(seen, "waiting", "an earlier change is still under way"), ahead
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
            return state, _stay(seen, "simulator", f"{_good(now)}, and nothing smaller would do", tuple(tried))
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
        """The best that was found, if it saves more than the change costs: requests that keep the limits or, where
        there is so much to do that hardly any would, work that is done."""
        after = self._with_what_there_is(seen.sizes, best.sizes, demand)
        if after == seen.sizes:
            return _stay(seen, "simulator", f"only {_good(now)}, and nothing that is allowed would do better", tried)
        then = best
        if best.expected_share < self.spec.attainment:  # under more load than today's sizes were judged by
            then = ahead.predict(best.sizes, load=now.load)
            tried = (*tried, then)
        moves = ScaleMoves.between(seen.sizes, after, has_switch=seen.price.switch_s is not None)
        delay_s = seen.price.delay_s(moves)
        today, hoped = now.expected_share, then.expected_share
        gain, least = hoped - today, max(_LEAST_GAIN, _CHANCE / math.sqrt(now.num) if now.num else 0.0)
        said = f"{now.sizes} would keep the limits for {today:.1%}, {best.sizes} for {hoped:.1%}"
        if max(today, hoped) < _HOPELESS:  # who is good by then is chance
            gain, least = demand.done(best.sizes) - demand.done(now.sizes), _LEAST_GAIN
            said += f" (of the work {demand.done(now.sizes):.0%} and {demand.done(best.sizes):.0%})"
        worth_s = gain * _HORIZON * self.spec.interval_s
        price_s = seen.price.lost_s(moves) / sum(seen.sizes)
        costs = f"worth {worth_s:.0f} s of all requests, for {price_s:.1f} s, in {delay_s:.0f} s"
        if gain < least or worth_s <= price_s:
            return replace(_stay(seen, "simulator", f"{said}: not {costs}", tried), worth_s=worth_s, price_s=price_s)
        return _Choice(
            after=after,
            mode="simulator",
            reason=f"{said}: {costs}",
            tried=tried,
            worth_s=worth_s,
            price_s=price_s,
        )

    def _with_what_there_is(self, now: PoolSizes, wanted: PoolSizes, demand: Demand) -> PoolSizes:
        """What is wanted now, and what there is beyond that where it is needed most: to give something up takes more
        than one look."""
        if now.prefill >= wanted.prefill and now.decode >= wanted.decode:
            return now
        num_devices = max(self.limits.num_devices(now), self.limits.num_devices(wanted))
        return self.limits.evenly(*demand.replicas, num_devices=num_devices, at_least=wanted)

    def _shrink(
        self,
        state: AutoscaleState,
        seen: Observation,
        sizes: PoolSizes,
        mode: Mode,
        why: str,
        tried: tuple[Prediction, ...],
    ) -> tuple[AutoscaleState, _Choice]:
        """To these sizes, once it has been calm for long enough; then to the most that was found meanwhile."""
        most = state.calm_sizes or sizes
        most = PoolSizes(max(most.prefill, sizes.prefill), max(most.decode, sizes.decode))
        state = replace(state, calm=state.calm + 1, calm_sizes=most)
        if most.prefill >= seen.sizes.prefill and most.decode >= seen.sizes.decode:  # now this pool, now that one
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
        """One replica at a time, by what is measured."""
        x, y = seen.sizes
        why = (
            f"the simulator was off by more than {BAND:g} (now {state.trust}), so by what is measured: "
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
        """What should have been good and was not was asked with too little load."""
        if measured["num"] < _LEAST_MEASURED:
            return state.correction
        if measured["good_share"] >= self.spec.attainment:
            return max(1.0, round(state.correction * _BETTER, 3))
        if expected.good_share < self.spec.attainment:
            return state.correction
        return min(_MOST_CORRECTION, round(state.correction * _WORSE, 3))

    def _after(self, state: AutoscaleState, decision: ScalingDecision) -> AutoscaleState:
        """What is kept of a decision."""
        if not decision.is_change:
            quiet = state.number - state.changed_at
            if state.patience > 1 and quiet >= 2 * _REGRET * state.patience:
                return replace(state, patience=state.patience // 2, changed_at=state.number)
            return state
        grows = sum(decision.after) > sum(decision.before)
        if grows and state.number - state.shrunk_at <= _REGRET * state.patience:
            state = replace(state, patience=min(2 * state.patience, _MOST_PATIENCE))
        return replace(state, changed_at=state.number)  # what is expected of the sizes that were there is void


def _stay(seen: Observation, mode: Mode, reason: str, tried: tuple[Prediction, ...] = ()) -> _Choice:
    return _Choice(after=seen.sizes, mode=mode, reason=reason, tried=tried)


def _good(now: Prediction) -> str:
    return f"{now.expected_share:.1%} of the requests keep the limits on {now.sizes}"
