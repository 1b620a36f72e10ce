"""Drafting: costs follow the current rows, and ended sequences are released."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence as Seq
from itertools import pairwise

from core.types.step_timing import StepTiming
from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence
from engine.spec_decode.speculation import Drafting, Speculation
from tests.engine.spec_decode.proposers import FakeProposer, sequence_of


class FakePrices:
    """StepTimes that never change, as in a simulated replica."""

    timing = StepTiming(base_s=1.0, token_s=1.0, context_s=0.01)
    draft_factors: Seq[float] = (1.0,)

    def set_aside(self, seconds: float) -> None:
        pass


def _drafting() -> Drafting:
    speculation = Speculation({"wrong": FakeProposer(lambda tokens, most: [7])}, max_tokens=8, vocab_size=50)
    return Drafting(speculation, FakePrices(), BlockManager(64), max_batch_tokens=64, max_running=64)


def _step(drafting: Drafting, rows: list[Sequence]) -> None:
    drafts = drafting.drafts(rows, num_tokens=len(rows), num_logits=len(rows))
    drafting.computed([(row, 1) for row in rows], drafts, num_tokens=len(rows))
    for row in rows:
        row.tokens.append(1)


def test_step_cost_grows_with_context() -> None:
    """So the break-even chance of a draft token falls: it is a smaller part of the step."""
    drafting, row = _drafting(), sequence_of([1, 2])
    floors = []
    for _ in range(4):
        before = row.drafts.floors if row.drafts else 0.0
        for _ in range(100):
            _step(drafting, [row])
        assert row.drafts
        floors.append(row.drafts.floors - before)
    assert all(later < 0.9 * earlier for earlier, later in pairwise(floors))


def test_ended_sequence_is_released_when_idle() -> None:
    drafting, rows = _drafting(), [sequence_of([1, 2])]
    seen = weakref.ref(rows[0])
    _step(drafting, rows)
    del rows[:]
    drafting.drafts([], num_tokens=0, num_logits=0)
    gc.collect()
    assert seen() is None
