"""For how long a model has had no replica that answers."""

from __future__ import annotations

import math
from collections.abc import Callable

from core.types.errors import ModelUnavailable


class Availability:
    """As far as it was looked at. Lives on the router's event loop."""

    def __init__(self, may_answer: Callable[[], bool], *, name: str, now: Callable[[], float]) -> None:
        """may_answer: whether there is a decode replica, or whoever takes guests. name: what clients call the
        model."""
        self._may_answer = may_answer
        self._name = name
        self._now = now
        self._since: float | None = None
        self._is_for_good = False

    def look(self) -> float | None:
        """Seconds since a look first found nobody who answers; None: there is somebody."""
        if self._may_answer():
            self._since = None
            return None
        now = self._now()
        self._since = now if self._since is None else self._since
        return now - self._since

    def check(self, *, within_s: float = math.inf) -> None:
        """Raises ModelAway where there has been none for longer than that, or there will be none any more."""
        if self._is_for_good or (within_s < math.inf and (self.look() or 0.0) > within_s):
            raise self.error()

    def end(self) -> None:
        """This router leaves the model: nobody need wait for a replica."""
        self._is_for_good = True

    def error(self) -> ModelUnavailable:
        called = f"model {self._name!r}" if self._name else "this model"
        why = "this router leaves it" if self._is_for_good else "it has no decode replica"
        return ModelUnavailable(f"{called} cannot be served at present: {why}", retry_after_s=1.0)
