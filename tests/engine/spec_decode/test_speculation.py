"""Speculation: drafts follow earlier outcomes and step costs, and rates are learned without drafts, too."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import pairwise

import pytest

from core.types.step_timing import StepTiming
from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence
from engine.spec_decode.speculation import Drafting, Speculation
from engine.spec_decode.step_cost import FREE, ProposalCost, StepCost
from tests.engine.spec_decode.proposers import (
    FakeClock,
    FakeModelProposer,
    FakeProposer,
    Replica,
    nothing,
    right,
    sequence_of,
    wrong,
)

_CHEAP = StepCost(plain=12.0, token=0.9)  # one row of a small model
_DEAR = StepCost(plain=1.0, token=1.0)
_NEVER = StepCost(plain=12.0, token=12.0)


def test_right_drafts_grow_and_wrong_ones_stop() -> None:
    replica, other = Replica(right=right), Replica(wrong=wrong)
    lengths = [replica.num_drafted(_CHEAP) for _ in range(100)]
    assert lengths[-1] == 8 and lengths[-1] > lengths[0]
    other.steps(50, FREE)
    before = other.speculation.counts["wrong"].drafted.total()
    other.steps(500, _CHEAP)
    assert other.speculation.counts["wrong"].drafted.total() == before, "a proposer that is never right is not drafted"


def test_undrafted_proposals_teach() -> None:
    replica = Replica(right=right)
    assert not any(replica.step(_NEVER) for _ in range(40))
    drafted = [replica.num_drafted(_CHEAP) for _ in range(8)]
    assert drafted[3:] == [8] * 5, "drafts must resume with the next look-up"


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("guess", [wrong, nothing])
def test_rows_without_drafts_back_off(guess: Callable[[Seq[int], int], list[int]], has_model: bool) -> None:
    for num_rows, every in ((2, 4), (16, 8)):
        proposer = FakeProposer(guess)
        mute = FakeModelProposer(right, FakeClock(), ProposalCost(0.0, 0.0, 0.0), can_guess=lambda sequence: False)
        replica = Replica(num_rows, guess=proposer, **{"mute": mute} if has_model else {})
        asked = []
        for _ in range(200):
            before = proposer.num_proposed
            replica.step(_DEAR)
            asked.append(proposer.num_proposed - before)
        assert asked[:4] == [num_rows] * 4, "every row is looked up at first"
        retried = [0 if step % every else num_rows for step in range(5, 201)]
        assert asked[4:] == retried, "rows under backoff must be looked up in the same steps only"


def test_would_draft_backs_off() -> None:
    proposer, rows = FakeProposer(wrong), [sequence_of([1])]
    speculation = Replica(wrong=proposer).speculation
    for _ in range(40):
        assert not speculation.would_draft(rows, lambda: _DEAR, max_tokens=8)
        rows[0].tokens += right(rows[0].tokens, 1)
    assert proposer.num_proposed == 4 + (40 - 4) // 4


def test_would_draft_skips_rows_under_backoff() -> None:
    replica = Replica(right=right)
    replica.steps(8, _DEAR)
    awaited = [replica.speculation.would_draft(replica.rows, lambda: _CHEAP, max_tokens=8) for _ in range(4)]
    assert awaited == [False] * 3 + [True]
    assert replica.step(_CHEAP), "a row that the step waited for must be drafted"


@pytest.mark.parametrize("seed", range(4))
def test_drafts_use_current_proposals(seed: int) -> None:
    """Every proposal is right for the current tokens, so a stale one would be wrong."""
    generator, clock = random.Random(seed), FakeClock()
    model = FakeModelProposer(
        right, clock, ProposalCost(0.0, 0.1, 0.0), can_guess=lambda sequence: len(sequence.tokens) % 3 > 0
    )
    sometimes = FakeProposer(lambda tokens, most: right(tokens, most) if generator.random() < 0.05 else [])
    replica = Replica(3, clock=clock, sometimes=sometimes, computes=model)
    num_drafted = 0
    for step in range(600):
        before = {row: list(row.tokens) for row in replica.rows}
        for row, draft in replica.step(_CHEAP if step % 24 > 11 else _NEVER).items():
            assert list(draft.tokens) == right(before[row], len(draft.tokens))
            num_drafted += 1
    assert num_drafted


@pytest.mark.parametrize("num_rows", [2, 16])
def test_cheaper_drafts_resume_soon(num_rows: int) -> None:
    replica = Replica(num_rows, right=right)
    replica.steps(40, _DEAR)
    drafted = [bool(replica.step(StepCost(plain=16.0, token=0.1))) for _ in range(20)]
    assert any(drafted[:8]) and all(drafted[8:])


def test_backoff_is_per_row() -> None:
    """The proposals for the last row are right, those for the others wrong."""
    asked: list[int] = []

    def guess(tokens: Seq[int], max_tokens: int) -> list[int]:
        asked.append(tokens[0])
        return (right if tokens[0] == 3 else wrong)(tokens, max_tokens)

    replica = Replica(4, guess=guess)
    replica.steps(30, _CHEAP)
    asked.clear()
    for _ in range(40):
        assert replica.rows[3] in replica.step(_CHEAP)
    assert asked.count(3) == 40 and asked.count(0) == asked.count(1) == asked.count(2) == 10


def test_cost_counts_rows_under_backoff() -> None:
    """A draft that pays beside one row does not pay beside four, three of them without proposals."""
    one_of_four = FakeProposer(lambda tokens, most: right(tokens, most) if tokens[0] == 3 else [])
    replica = Replica(4, guess=one_of_four)
    replica.steps(29, _CHEAP)
    dear, asked = StepCost(plain=4.0, token=2.0), one_of_four.num_proposed
    assert not replica.speculation.would_draft([*replica.rows], lambda: dear, max_tokens=64)
    assert one_of_four.num_proposed == asked + 1
    assert not replica.step(dear)
    replica.rows = replica.rows[3:]
    assert replica.step(dear)


def test_backoff_can_be_disabled() -> None:
    silent = FakeProposer(nothing)
    Replica(9, silent=silent, backs_off=False).steps(100, _CHEAP)
    assert silent.num_proposed == 900


def test_drafts_stay_within_room() -> None:
    replica = Replica(3, right=right, backs_off=False)
    for room in (0, 1, 2, 5, 30):
        assert replica.num_drafted(FREE, room=room) == min(room, 3 * 8)


@pytest.mark.parametrize("ends_after", range(12))
def test_drafts_stop_at_end_of_answer(ends_after: int) -> None:
    assert Replica(right=right, ends_at=1 + ends_after).num_drafted(FREE) == max(0, min(8, ends_after - 1))
    moving = Replica(right=right)
    moving.rows[0].most_tokens = 1 + ends_after  # room for KV at its destination
    assert moving.num_drafted(FREE) == min(8, ends_after)


def test_best_proposer_is_drafted() -> None:
    generator = random.Random(0)

    def half(tokens: Seq[int], max_tokens: int) -> list[int]:
        return (right if generator.random() < 0.3 else wrong)(tokens, max_tokens)

    replica = Replica(half=half, right=right, silent=nothing)
    replica.steps(30, _CHEAP)
    counts = replica.speculation.counts
    before = counts["half"].drafted.total()
    replica.steps(100, _CHEAP)
    assert counts["half"].drafted.total() == before
    assert counts["right"].accepted.total() > 700
    assert not counts["silent"].drafted


def test_would_draft_only_if_drafts_pay() -> None:
    rows = [sequence_of([1])]

    def would_draft(guess: Callable[[Seq[int], int], list[int]], cost: StepCost) -> bool:
        return Replica(guess=guess).speculation.would_draft(rows, lambda: cost, max_tokens=8)

    assert would_draft(right, _CHEAP) and not would_draft(nothing, _CHEAP)
    assert not would_draft(right, StepCost(plain=1.0, token=2.0))


def test_rejected_blocks_are_freed_and_others_kept() -> None:
    speculation = Speculation({"right": FakeProposer(right)}, max_tokens=8, vocab_size=50)
    blocks, sequence = BlockManager(4), sequence_of(range(8))
    sequence.blocks, _ = blocks.allocate([], 1) or ([], 0)
    sequence.num_computed = 7
    other, _ = blocks.allocate([], 2) or ([], 0)
    drafts = speculation.draft([sequence], lambda: FREE, max_tokens=64, blocks=blocks)
    assert len(drafts[sequence].tokens) == 8 and len(sequence.blocks) == 2  # of 8 tokens each
    sequence.num_computed = 8
    drafts[sequence].give_back(sequence, blocks, num_right=0)
    assert len(sequence.blocks) == 1 and blocks.num_available == 1
    more, _ = blocks.allocate([], 1) or ([], 0)
    assert not Replica(right=right).speculation.draft([sequence], lambda: FREE, max_tokens=64, blocks=blocks)
    assert len(sequence.blocks) == 1 and len(other) == 2 and len(more) == 1


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
    decoding = [(row, 1) for row in rows]
    drafting.computed(decoding, drafting.drafts(decoding, [], []))
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


def test_ended_sequence_is_released() -> None:
    drafting, rows = _drafting(), [sequence_of([1, 2])]
    seen = weakref.ref(rows[0])
    for _ in range(40):
        _step(drafting, rows)
    drafting.forget(rows.pop())
    gc.collect()
    assert seen() is None
