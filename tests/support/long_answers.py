"""Answers that cannot end before a test allows it, which makes tests independent of the machine's speed.

under = Ceiling(20)
under.arm(monkeypatch.setattr)      # decode replicas in this process; others: `LocalCluster.add(…, ceiling=…)`
…                                   # every answer stops at 20 tokens; its replica keeps serving everything else
under.lift()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any

from engine.scheduler.decoding import Decoding
from engine.scheduler.next_tokens import DecodingRows, NextTokens
from engine.scheduler.sequence import Sequence
from worker import migrations, replica_service
from worker.step_loop import StepLoop


class Ceiling:
    """Limit that stops decoding at `num_tokens` of an answer until `lift`. Stopped sequences can be moved, copied,
    aborted and killed, and are never too near their end to be worth a move."""

    def __init__(self, num_tokens: int, *, lifted: threading.Event | Event | None = None) -> None:
        """lifted: event shared with other processes that arm this ceiling."""
        self._num_tokens = num_tokens
        self._lifted = lifted or threading.Event()

    def lift(self) -> None:
        """Remove the limit for good."""
        self._lifted.set()

    def arm(self, replace: Callable[[Any, str, Any], None] = setattr) -> None:
        """Install the limit in this process. replace: sets an attribute, such as monkeypatch.setattr."""
        make_room = Decoding.make_room

        def make_room_below(decoding: Decoding) -> NextTokens:
            sequences = make_room(decoding).rows.sequences
            return NextTokens(DecodingRows([sequence for sequence in sequences if not self._holds(sequence)]))

        replace(Decoding, "make_room", make_room_below)
        replace(migrations, "is_quicker_to_ship", lambda **_: True)
        replace(replica_service, "StepLoop", _eager_loop)

    def _holds(self, sequence: Sequence) -> bool:
        if self._lifted.is_set() or threading.current_thread() is threading.main_thread():
            return False  # reference answers that the test itself generates
        return sequence.num_generated >= self._num_tokens


def _eager_loop(**arguments: Any) -> StepLoop:
    """Return a step loop that polls when idle, so that stopped sequences continue at once after `lift`."""
    return StepLoop(**(arguments | {"idle_s": 0.01}))
