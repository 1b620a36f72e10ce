"""What may be spent on what does not seem to pay, to know whether it would."""

from __future__ import annotations

_SHARE = 0.005  # of the time of such steps
_MOST_STEPS = 64.0  # whose time lies in it: what long idling has saved is not spent at once


class Purse:
    """Owned by the step thread. Of each step for which somebody looks what to draft, a small share of its time goes in,
    and trials are paid from it, also those that could not wait for it: these are owed, and nothing else is tried until
    they are paid. So trials take no more than that share of the time, beside what is owed, and what the last one took
    longer than was expected.

    Seconds, or whatever a step's price is in."""

    def __init__(self) -> None:
        self._saved = 0.0

    def earn(self, step: float) -> None:
        """A step takes so long without drafts."""
        self._saved = min(self._saved + _SHARE * step, _MOST_STEPS * step)

    def can_pay(self, cost: float) -> bool:
        return cost <= self._saved

    def pay(self, cost: float) -> None:
        self._saved -= cost
