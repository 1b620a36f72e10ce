"""What may be spent on what does not seem to pay, to know whether it would."""

from __future__ import annotations

_SHARE = 0.005  # of the time of such steps
_FIRST = 1.0  # steps whose time lies in it at first
_MOST = 64.0  # what long idling has saved is not spent at once


class Purse:
    """Owned by the step thread. Of each step a small share of its time goes in, and trials are paid from it. So they
    take no more than that share of the time, beside what lies in it at first, and what the last one took longer than
    was expected.

    It counts steps: what one takes is in seconds, or in whatever its price is, and that may become another."""

    def __init__(self) -> None:
        self._saved = _FIRST
        self._step = 0.0  # what the last one takes
        self._num_unpriced = 0  # steps since then

    def earn(self, step: float) -> None:
        """A step takes so long without drafts, and as long took those before it of which nobody has asked that."""
        self._step = step
        self._saved = min(self._saved + _SHARE * (1 + self._num_unpriced), _MOST)
        self._num_unpriced = 0

    def earn_later(self) -> None:
        """A step for which nobody looks what to draft."""
        self._num_unpriced += 1

    def can_pay(self, cost: float) -> bool:
        return cost <= self._saved * self._step

    def pay(self, cost: float) -> None:
        """Behind a step that was earned."""
        self._saved -= cost / self._step
