"""Answers that cannot end before a test lets them: they run when something happens, on any machine.

under = Ceiling(20)
under.arm(monkeypatch.setattr)      # decode replicas in this process; others: `LocalCluster.add(…, ceiling=…)`
…                                   # every answer stands still at 20 tokens; its replica goes on with all else
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
    """No sequence decodes beyond `num_tokens` of its answer until `lift`. What stands there may be moved, copied,
    stopped, and killed; it never is too near its end to be worth a move."""

    def __init__(self, num_tokens: int, *, lifted: threading.Event | Event | None = None) -> None:
        """lifted: one that other processes share, where they are to arm this."""
        self._num_tokens = num_tokens
        self._lifted = lifted or threading.Event()

    def lift(self) -> None:
        """For good."""
        self._lifted.set()

    def arm(self, replace: Callable[[Any, str, Any], None] = setattr) -> None:
        """In this process; `replace` puts a function in another's place."""
        make_room = Decoding.make_room

        def make_room_below(decoding: Decoding) -> NextTokens:
            sequences = make_room(decoding).rows.sequences
            return NextTokens(DecodingRows([sequence for sequence in sequences if not self._holds(sequence)]))

        replace(Decoding, "make_room", make_room_below)
        replace(migrations, "is_quicker_to_ship", lambda **_: True)
        replace(replica_service, "StepLoop", _eager_loop)

    def _holds(self, sequence: Sequence) -> bool:
        if self._lifted.is_set() or threading.current_thread() is threading.main_thread():
            return False  # what the test itself generates, as a reference
        return sequence.num_generated >= self._num_tokens


def _eager_loop(**arguments: Any) -> StepLoop:
    """Looks again soon where there was nothing to do: what stands still goes on at once when it may."""
    return StepLoop(**(arguments | {"idle_s": 0.01}))
