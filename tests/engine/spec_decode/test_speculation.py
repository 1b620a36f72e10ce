"""Speculation: drafts follow earlier outcomes and step costs, and rates are learned without drafts, too."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft import Draft
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.step_cost import FREE, ProposalCost, StepCost
from tests.engine.spec_decode.proposers import FakeClock, FakeModelProposer, FakeProposer, sequence_of

_CHEAP = StepCost(plain=12.0, token=0.9)  # one row of a small model
_FULL = StepCost(plain=70.0, token=0.9)  # 64 of them
_BLOCKS = 400  # per row


def _next(tokens: Seq[int]) -> int:
    return (tokens[-1] * 7 + 3) % 50


def _right(tokens: Seq[int], max_tokens: int) -> list[int]:
    grown = list(tokens)
    for _ in range(max_tokens):
        grown.append(_next(grown))
    return grown[len(tokens) :]


def _wrong(tokens: Seq[int], max_tokens: int) -> list[int]:
    return [(token + 1) % 50 for token in _right(tokens, max_tokens)]


def _nothing(tokens: Seq[int], max_tokens: int) -> list[int]:
    return []


class Replica:
    """Rows that all continue by `_next`, with their drafts."""

    def __init__(self, speculation: Speculation, num_rows: int = 1, max_tokens: int = 4000) -> None:
        self.blocks = BlockManager(_BLOCKS * num_rows)
        self.rows = [sequence_of([number], num_prompt_tokens=1) for number in range(num_rows)]
        for row in self.rows:
            row.ends_at = max_tokens
        self._speculation = speculation

    def step(self, price: StepCost, *, room: int = 64) -> dict[Sequence, Draft]:
        drafts = self._speculation.draft(self.rows, lambda: price, max_tokens=room, blocks=self.blocks)
        for row in self.rows:
            draft = drafts.get(row)
            chosen = [_next(row.tokens)]
            for drafted in draft.tokens if draft else ():
                if drafted != chosen[-1]:
                    break
                chosen.append(_next([*row.tokens, *chosen]))
            row.tokens += chosen
            row.num_computed = len(row.tokens) - 1
            if draft:
                draft.give_back(row, self.blocks, num_right=0)
                self._speculation.verified(draft, chosen)
            row.release(self.blocks)
        return drafts


def _speculation(**guesses: FakeProposer) -> Speculation:
    return Speculation(guesses, max_tokens=8, vocab_size=50)


def test_right_drafts_grow_and_wrong_ones_stop() -> None:
    right, wrong = _speculation(right=FakeProposer(_right)), _speculation(wrong=FakeProposer(_wrong))
    replica, other = Replica(right), Replica(wrong)
    lengths = [sum(len(draft.tokens) for draft in replica.step(_CHEAP).values()) for _ in range(100)]
    assert lengths[-1] == 8 and lengths[-1] > lengths[0]
    for _ in range(50):
        other.step(FREE)
    before = wrong.counts["wrong"].drafted.total()
    for _ in range(500):
        other.step(_CHEAP)
    assert wrong.counts["wrong"].drafted.total() == before, "a proposer that is never right must not be drafted"


def test_undrafted_proposals_teach() -> None:
    speculation = _speculation(right=FakeProposer(_right))
    dear = StepCost(plain=12.0, token=12.0)
    replica = Replica(speculation)
    assert not any(replica.step(dear) for _ in range(40))
    drafted = [sum(len(draft.tokens) for draft in replica.step(_CHEAP).values()) for _ in range(8)]
    assert drafted[3:] == [8] * 5, "drafts must resume with the next look-up"


def test_next_to_nothing_is_drafted_when_drafts_do_not_pay() -> None:
    speculation = _speculation(sometimes=FakeProposer(lambda tokens, most: _right(tokens, most)[:1] + [49] * 7))
    replica = Replica(speculation, num_rows=4)
    dear = StepCost(plain=4.0, token=2.0)
    drafted = [sum(len(draft.tokens) for draft in replica.step(dear).values()) for _ in range(640)]
    assert sum(count > 0 for count in drafted) <= 10 and max(drafted) <= 4


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("guess", [_wrong, _nothing])
def test_rows_without_drafts_back_off(guess: Callable[[Seq[int], int], list[int]], has_model: bool) -> None:
    for num_rows, every in ((2, 4), (16, 8)):
        proposer = FakeProposer(guess)
        mute = FakeModelProposer(_right, FakeClock(), ProposalCost(0.0, 0.0, 0.0), can_guess=lambda sequence: False)
        models = {"mute": mute} if has_model else {}
        speculation = Speculation({"guess": proposer}, models=models, max_tokens=8, vocab_size=50)
        replica = Replica(speculation, num_rows=num_rows)
        asked = []
        for _ in range(200):
            before = proposer.num_proposed
            replica.step(StepCost(plain=1.0, token=1.0))
            asked.append(proposer.num_proposed - before)
        assert asked[:8] == [num_rows] * 8, "every row is looked up at first"
        assert [count for i, count in enumerate(asked[8:], 9) if i % every == 0] == [num_rows] * (192 // every)
        assert sum(asked[8:]) == num_rows * (192 // every), (
            "rows under backoff must be looked up in the same steps only"
        )


def test_would_draft_backs_off() -> None:
    proposer = FakeProposer(_wrong)
    speculation, rows = _speculation(wrong=proposer), [sequence_of([1])]
    for _ in range(40):
        assert not speculation.would_draft(rows, lambda: StepCost(plain=1.0, token=1.0), max_tokens=8)
        rows[0].tokens.append(_next(rows[0].tokens))
    assert proposer.num_proposed == 8 + (40 - 8) // 4


def test_would_draft_skips_rows_under_backoff() -> None:
    speculation = _speculation(right=FakeProposer(_right))
    replica = Replica(speculation)
    for _ in range(8):
        replica.step(StepCost(plain=1.0, token=1.0))
    assert [speculation.would_draft(replica.rows, lambda: _CHEAP, max_tokens=8) for _ in range(4)] == [False] * 3 + [
        True
    ]
    assert replica.step(_CHEAP), "a row that the step waited for must be drafted"


@pytest.mark.parametrize("seed", range(4))
def test_drafts_use_current_proposals(seed: int) -> None:
    """Every proposal is right for the current tokens, so a stale one would be wrong."""
    generator, clock = random.Random(seed), FakeClock()
    speculation = Speculation(
        {"sometimes": FakeProposer(lambda tokens, most: _right(tokens, most) if generator.random() < 0.05 else [])},
        models={
            "computes": FakeModelProposer(
                _right, clock, ProposalCost(0.0, 0.1, 0.0), can_guess=lambda sequence: len(sequence.tokens) % 3 > 0
            )
        },
        max_tokens=8,
        vocab_size=50,
        clock=clock,
    )
    replica = Replica(speculation, num_rows=3)
    num_drafted = 0
    for step in range(600):
        before = {row: list(row.tokens) for row in replica.rows}
        for row, draft in replica.step(_CHEAP if step % 24 > 11 else StepCost(plain=12.0, token=12.0)).items():
            assert list(draft.tokens) == _right(before[row], len(draft.tokens))
            num_drafted += 1
    assert num_drafted


@pytest.mark.parametrize("num_rows", [2, 16])
def test_cheaper_drafts_resume_soon(num_rows: int) -> None:
    replica = Replica(_speculation(right=FakeProposer(_right)), num_rows=num_rows)
    for _ in range(40):
        replica.step(StepCost(plain=1.0, token=1.0))
    drafted = [bool(replica.step(StepCost(plain=16.0, token=0.1))) for _ in range(20)]
    assert any(drafted[:8]) and all(drafted[8:])


def test_backoff_is_per_row() -> None:
    """The proposals for the last row are right, those for the others wrong."""
    asked: list[int] = []

    def guess(tokens: Seq[int], max_tokens: int) -> list[int]:
        asked.append(tokens[0])
        return _right(tokens, max_tokens) if tokens[0] == 3 else _wrong(tokens, max_tokens)

    replica = Replica(_speculation(guess=FakeProposer(guess)), num_rows=4)
    for _ in range(30):
        replica.step(_CHEAP)
    asked.clear()
    for _ in range(40):
        assert replica.rows[3] in replica.step(_CHEAP)
    assert asked.count(3) == 40 and asked.count(0) == asked.count(1) == asked.count(2) == 10


def test_cost_counts_rows_under_backoff() -> None:
    """A draft that pays beside one row does not pay beside four, three of them without proposals."""
    one_of_four = FakeProposer(lambda tokens, most: _right(tokens, most) if tokens[0] == 3 else [])
    speculation = _speculation(guess=one_of_four)
    replica = Replica(speculation, num_rows=4)
    for _ in range(29):
        replica.step(_CHEAP)
    dear, asked = StepCost(plain=4.0, token=2.0), one_of_four.num_proposed
    assert (
        not speculation.would_draft([*replica.rows], lambda: dear, max_tokens=64)
        and one_of_four.num_proposed == asked + 1
    )
    assert not replica.step(dear)
    alone = Replica(speculation)
    alone.rows = replica.rows[3:]
    assert alone.step(dear)


def test_backoff_can_be_disabled() -> None:
    silent = FakeProposer(_nothing)
    replica = Replica(Speculation({"silent": silent}, max_tokens=8, vocab_size=50, backs_off=False), num_rows=9)
    for _ in range(100):
        replica.step(_CHEAP)
    assert silent.num_proposed == 900


def test_drafts_stay_within_room() -> None:
    replica = Replica(_speculation(right=FakeProposer(_right)), num_rows=3)
    for room in (0, 1, 2, 5, 30):
        assert sum(len(draft.tokens) for draft in replica.step(FREE, room=room).values()) == min(room, 3 * 8)


@pytest.mark.parametrize("ends_after", range(12))
def test_drafts_stop_at_end_of_answer(ends_after: int) -> None:
    replica = Replica(_speculation(right=FakeProposer(_right)), max_tokens=1 + ends_after)
    drafts = replica.step(FREE)
    assert sum(len(draft.tokens) for draft in drafts.values()) == max(0, min(8, ends_after - 1))
    moving = Replica(_speculation(right=FakeProposer(_right)))
    moving.rows[0].most_tokens = 1 + ends_after  # room for KV at its destination
    assert sum(len(draft.tokens) for draft in moving.step(FREE).values()) == min(8, ends_after)


def test_invalid_token_id_ends_a_draft() -> None:
    for bad in (-1, 50, 1 << 40):
        speculation = _speculation(bad=FakeProposer(lambda tokens, most, bad=bad: [*_right(tokens, 2), bad, 1]))
        assert [list(draft.tokens) for draft in Replica(speculation).step(FREE).values()] == [_right([0], 2)]


def test_best_proposer_is_drafted() -> None:
    generator = random.Random(0)

    def half(tokens: Seq[int], max_tokens: int) -> list[int]:
        return (_right if generator.random() < 0.3 else _wrong)(tokens, max_tokens)

    speculation = _speculation(half=FakeProposer(half), right=FakeProposer(_right), silent=FakeProposer(_nothing))
    replica = Replica(speculation)
    for _ in range(30):
        replica.step(_CHEAP)
    before = speculation.counts["half"].drafted.total()
    for _ in range(100):
        replica.step(_CHEAP)
    assert speculation.counts["half"].drafted.total() == before
    assert speculation.counts["right"].accepted.total() > 700
    assert not speculation.counts["silent"].drafted


def test_would_draft_only_if_drafts_pay() -> None:
    right, silent = _speculation(right=FakeProposer(_right)), _speculation(silent=FakeProposer(_nothing))
    rows = [sequence_of([1])]
    assert right.would_draft(rows, lambda: _CHEAP, max_tokens=8) and not silent.would_draft(
        rows, lambda: _CHEAP, max_tokens=8
    )
    assert not right.would_draft(rows, lambda: StepCost(plain=1.0, token=2.0), max_tokens=8)


def test_rejected_blocks_are_freed_and_others_kept() -> None:
    blocks = BlockManager(4)
    sequence = sequence_of(range(8))
    sequence.blocks, _ = blocks.allocate([], 1) or ([], 0)
    sequence.num_computed = 7
    other, _ = blocks.allocate([], 2) or ([], 0)
    drafts = _speculation(right=FakeProposer(_right)).draft([sequence], lambda: FREE, max_tokens=64, blocks=blocks)
    assert len(drafts[sequence].tokens) == 8 and len(sequence.blocks) == 2  # of 8 tokens each
    sequence.num_computed = 8
    drafts[sequence].give_back(sequence, blocks, num_right=0)
    assert len(sequence.blocks) == 1 and blocks.num_available == 1
    more, _ = blocks.allocate([], 1) or ([], 0)
    assert not _speculation(right=FakeProposer(_right)).draft([sequence], lambda: FREE, max_tokens=64, blocks=blocks)
    assert len(sequence.blocks) == 1 and len(other) == 2 and len(more) == 1
