"""DraftScheduler: calls model proposers where they pay, and hardly ever where they do not."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from itertools import combinations

import pytest

from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_plan import CallOffer, plan_call, plan_drafts
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.step_cost import LearnedProposalCost, ProposalCost, StepCost
from tests.engine.spec_decode.proposers import FakeClock, FakeModelProposer, FakeProposer, sequence_of

_STEP = StepCost(plain=10.0, token=0.5)  # one row
_CHEAP = ProposalCost(0.2, 1.0, 0.05)
_DEAR = ProposalCost(0.2, 12.0, 0.05)
_MAX = 6


def _next(token: int) -> int:
    return (token * 7 + 3) % 50


def _right(tokens: Seq[int], max_tokens: int) -> list[int]:
    grown = [tokens[-1]]
    for _ in range(max_tokens):
        grown.append(_next(grown[-1]))
    return grown[1:]


def _wrong(tokens: Seq[int], max_tokens: int) -> list[int]:
    return [(token + 1) % 50 for token in _right(tokens, max_tokens)]


def _row(tokens: Seq[int]) -> Sequence:
    row = sequence_of(tokens)
    row.ends_at = 100_000
    return row


class Replica:
    """Rows that continue by `_next`, timed by the fake clock. Each ends after `num_tokens` and is replaced."""

    def __init__(self, clock: FakeClock, num_rows: int = 1, *, num_tokens: int = 200, **methods: object) -> None:
        free = {name: one for name, one in methods.items() if isinstance(one, FakeProposer)}
        models = {name: one for name, one in methods.items() if isinstance(one, FakeModelProposer)}
        self.speculation = Speculation(free, models=models, max_tokens=_MAX, vocab_size=50, clock=clock)
        self.blocks = BlockManager(4000)
        self.rows = [_row([number]) for number in range(num_rows)]
        self.num_tokens, self.seconds = 0, 0.0
        self._clock, self._ends_after, self._computing = clock, num_tokens, list(models.values())

    def step(self, price: StepCost = _STEP, *, room: int = 64) -> int:
        """Run a step; return the number of drafted tokens."""
        begin = self._clock.now
        drafts = self.speculation.draft(self.rows, lambda: price, max_tokens=room, blocks=self.blocks)
        num_drafted = sum(len(draft.tokens) for draft in drafts.values())
        self._clock.now += price.step(num_drafted)
        for row in self.rows:
            draft = drafts.get(row)
            chosen = [_next(row.tokens[-1])]
            for drafted in draft.tokens if draft else ():
                if drafted != chosen[-1]:
                    break
                chosen.append(_next(chosen[-1]))
            row.tokens += chosen
            self.num_tokens += len(chosen)
            row.num_computed = len(row.tokens) - 1
            if draft:
                draft.give_back(row, self.blocks, num_right=0)
                self.speculation.verified(draft, chosen)
            row.release(self.blocks)
        for proposer in self._computing:
            proposer.stepped(self.rows)
        self.rows = [row if row.num_generated < self._ends_after else _row([row.tokens[0]]) for row in self.rows]
        self.seconds += self._clock.now - begin
        return num_drafted

    def steps(self, count: int, price: StepCost = _STEP) -> float:
        """Return the tokens per second over `count` steps, relative to steps without drafts."""
        tokens, seconds = self.num_tokens, self.seconds
        for _ in range(count):
            self.step(price)
        rate = (self.num_tokens - tokens) / (self.seconds - seconds)
        return rate / (len(self.rows) / price.plain)


def _rate(
    guesses: Seq[Seq[float]], offer: CallOffer, depth: int, rows: Seq[int], price: StepCost, max_tokens: int
) -> float:
    """Return the best token rate with a call for these rows."""
    chances = [offer.chances[row][:depth] if row in rows else guess for row, guess in enumerate(guesses)]
    tokens = sorted((chance for row in chances for chance in row), reverse=True)[:max_tokens]
    asking_s = offer.cost.seconds(depth, sum(offer.missing[row] + depth - 1 for row in rows)) if rows else 0.0
    drafted = [(len(guesses) + sum(tokens[:n])) / (price.step(n) + asking_s) for n in range(len(tokens) + 1)]
    return max(drafted)


@pytest.mark.parametrize("seed", range(40))
def test_planned_call_has_the_best_rate(seed: int) -> None:
    generator = random.Random(seed)

    def falling(most: int) -> list[float]:
        row, chance = list[float](), 1.0
        for _ in range(generator.randrange(most + 1)):
            chance *= generator.uniform(0.3, 1.0)
            row.append(chance)
        return row

    num_rows = 1 + generator.randrange(4)
    guesses = [falling(2) for _ in range(num_rows)]
    price = StepCost(plain=1.0, token=generator.random() / 6)
    offers = []
    for name in ("one", "other"):
        asked = ProposalCost(*(generator.random() / most for most in (5, 5, 20)))
        missing = [generator.uniform(0, 3) for _ in range(num_rows)]
        offers.append(CallOffer(name, asked, [falling(4) for _ in range(num_rows)], missing))
    every = [
        (_rate(guesses, offer, depth, rows, price, 99), offer.method)
        for offer in offers
        for depth in (1, 2, 3, 4)
        for count in range(1, num_rows + 1)
        for rows in combinations(range(num_rows), count)
        if all(offer.chances[row] for row in rows)
    ]
    none = _rate(guesses, offers[0], 0, (), price, 99)
    best = max(every, default=(0.0, ""))[0]
    found = plan_call(guesses, offers, price, 99)
    if found is None:
        assert best <= none * 1.03
        return
    offer = next(one for one in offers if one.method == found.method)
    assert _rate(guesses, offer, found.depth, found.rows, price, 99) > 0.99 * best
    assert best > none * 1.01


def test_planned_call_stays_within_draft_limit() -> None:
    chances = [[0.9, 0.8, 0.7]] * 5
    offer = CallOffer("m", ProposalCost(0.0, 0.01, 0.01), chances, [1.0] * 5)
    for most in range(1, 20):
        plan = plan_call([()] * 5, [offer], StepCost(plain=1.0, token=0.01), most)
        assert plan and (len(plan.rows) - 1) * plan.depth < most


def test_proposal_cost_is_learned_from_any_calls() -> None:
    generator, true, learned = random.Random(2), ProposalCost(0.003, 0.005, 0.0007), LearnedProposalCost()
    assert learned.cost is None
    for number in range(80):
        depth, num_tokens = generator.randrange(1, 8), generator.randrange(1, 60)
        seconds = true.seconds(depth, num_tokens) * generator.uniform(0.9, 1.1)
        learned.observe(depth, num_tokens, seconds * (50 if number == 70 else 1))
    assert learned.cost
    for depth, num_tokens in ((1, 1), (4, 20), (7, 50)):
        assert learned.cost.seconds(depth, num_tokens) == pytest.approx(true.seconds(depth, num_tokens), rel=0.2)
    for _ in range(80):  # the machine has become slower
        depth, num_tokens = generator.randrange(1, 8), generator.randrange(1, 60)
        learned.observe(depth, num_tokens, 3 * true.seconds(depth, num_tokens))
    assert learned.cost.seconds(4, 20) == pytest.approx(3 * true.seconds(4, 20), rel=0.3)
    # Calls of one kind determine only the sum of the terms.
    same = LearnedProposalCost()
    for _ in range(20):
        same.observe(3, 5, true.seconds(3, 5))
    assert same.cost and same.cost.seconds(3, 5) == pytest.approx(true.seconds(3, 5), rel=0.01)


def test_right_proposer_is_called_at_full_depth() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(_right, clock, _CHEAP)
    replica = Replica(clock, m=proposer)
    replica.steps(40)
    assert replica.steps(100) > 2.5
    assert proposer.calls[-1] == (1, _MAX)
    counts = replica.speculation.counts["m"]
    assert counts.accepted.total() == counts.drafted.total() > 500


@pytest.mark.parametrize(("guess", "price"), [(_wrong, _CHEAP), (_right, _DEAR)], ids=["wrong", "dear"])
def test_unprofitable_proposer_costs_next_to_nothing(guess: type, price: ProposalCost) -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(guess, clock, price)
    replica = Replica(clock, m=proposer)
    replica.steps(100)
    before_s = proposer.spent_s
    assert replica.steps(3000) > 0.993
    assert len(proposer.calls) > 5, "trials must continue, to notice an improvement"
    assert before_s < 12 * _STEP.plain
    assert proposer.spent_s < 0.006 * replica.seconds


def test_trials_find_proposer_that_became_right() -> None:
    clock, is_right = FakeClock(), [False]
    proposer = FakeModelProposer(lambda tokens, most: (_right if is_right[0] else _wrong)(tokens, most), clock, _CHEAP)
    replica = Replica(clock, m=proposer)
    replica.steps(300)
    is_right[0] = True
    replica.steps(1000)
    assert replica.steps(100) > 1.5


def test_exploration_cost_is_bounded_for_any_price() -> None:
    for price in (_CHEAP, _DEAR, ProposalCost(0.2, 0.1, 0.01)):
        clock = FakeClock()
        proposer = FakeModelProposer(_wrong, clock, price)
        replica = Replica(clock, m=proposer)
        replica.steps(100)
        longest_s = price.seconds(4, 4)
        assert proposer.spent_s <= _STEP.plain * (1 + 0.005 * 100) + longest_s


def test_unprofitable_proposer_rests_with_trials_early_in_answers() -> None:
    clock, is_right = FakeClock(), [False]
    tried: list[int] = []
    planned: list[int] = []

    def guess(tokens: Seq[int], most: int) -> list[int]:
        tried.append(len(tokens) - 1)
        return (_right if is_right[0] else _wrong)(tokens, most)

    def knows(sequence: Sequence) -> bool:
        planned.append(sequence.num_generated)
        return not proposer.rests or sequence.num_generated < 32

    proposer = FakeModelProposer(guess, clock, ProposalCost(0.2, 0.5, 0.01), can_guess=knows)
    replica = Replica(clock, m=proposer)
    assert proposer.rests, "a proposer rests until a call pays"
    replica.steps(400)
    assert tried and proposer.rests
    tried.clear()
    planned.clear()
    replica.steps(6000)
    assert proposer.rests and len(tried) > 10
    assert sum(place > 16 for place in planned) <= 6000 // 32, "plans after the first tokens of an answer must be rare"
    assert max(tried) < 32 and len(set(tried)) > 2, "trials must vary in position"
    num_gathered = 0
    for _ in range(3000):
        replica.steps(1)
        num_gathered += proposer.num_first is None or replica.rows[0].num_generated <= proposer.num_first
    assert 0 < num_gathered < 300, "it must not collect state while no trial is due"
    is_right[0] = True
    replica.steps(1000)
    assert not proposer.rests and replica.steps(100) > 1.5
    is_right[0] = False
    replica.steps(3000)
    assert proposer.rests


@pytest.mark.parametrize("num_tokens", [20, 100])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_resting_proposer_wakes_when_it_becomes_right(num_rows: int, num_tokens: int) -> None:
    """Although it has no state of the tokens that it has missed."""
    for others in range(0, 200, 74):
        clock, is_right = FakeClock(), [False]

        def guess(tokens: Seq[int], most: int, is_right: list[bool] = is_right) -> list[int]:
            return (_right if is_right[0] else _wrong)(tokens, most)

        proposer = FakeModelProposer(guess, clock, ProposalCost(0.2, 0.5, 0.01))
        replica = Replica(clock, num_rows, num_tokens=num_tokens, m=proposer)
        replica.steps(3000 + others)
        assert proposer.rests
        is_right[0] = True
        replica.steps(400 if num_tokens == 20 else 600)
        assert not proposer.rests


def test_resting_proposer_is_tried_with_short_answers() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(_wrong, clock, ProposalCost(0.2, 0.5, 0.01))
    replica = Replica(clock, num_tokens=4, m=proposer)
    replica.steps(6000)
    proposer.calls.clear()
    replica.steps(6000)
    assert proposer.rests and len(proposer.calls) > 6


def test_calls_are_rare_when_draft_tokens_are_expensive() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(_right, clock, ProposalCost(0.0, 0.2, 0.3))
    replica = Replica(clock, num_rows=4, m=proposer)
    few = StepCost(plain=10.0, token=0.1)
    replica.steps(60, few)
    assert proposer.calls[-1][0] == 4
    full = StepCost(plain=10.0, token=3.0)
    proposer.calls.clear()
    assert replica.steps(500, full) > 0.98
    assert {num_rows for num_rows, _ in proposer.calls} == {1} and len(proposer.calls) <= 25
    proposer.calls.clear()
    for _ in range(200):
        replica.step(few, room=0)
    assert not proposer.calls


def test_only_profitable_rows_are_called() -> None:
    clock = FakeClock()

    def guess(tokens: Seq[int], most: int) -> list[int]:
        return (_right if sum(tokens[:1]) % 2 else _wrong)(tokens, most)  # the first token of a row never changes

    proposer = FakeModelProposer(guess, clock, ProposalCost(0.0, 0.2, 0.3))
    replica = Replica(clock, num_rows=4, m=proposer)
    replica.steps(60)
    proposer.calls.clear()
    replica.steps(20)
    assert proposer.calls[-1][0] == 2


def test_rows_that_cannot_be_proposed_for_are_not_called() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(_right, clock, _CHEAP, can_guess=lambda sequence: sequence.tokens[0] == 1)
    replica = Replica(clock, num_rows=3, m=proposer)
    replica.steps(60)
    assert {num_rows for num_rows, _ in proposer.calls} == {1}


def test_long_prompt_catches_up_in_pieces() -> None:
    clock, price = FakeClock(), ProposalCost(0.0, 0.5, 0.05)
    proposer = FakeModelProposer(_right, clock, price)
    replica = Replica(clock, m=proposer)
    replica.steps(50)
    replica.rows = [_row([i % 50 for i in range(3000)])]
    longest_s = 0.0
    for _ in range(120):
        before = proposer.spent_s
        replica.step()
        longest_s = max(longest_s, proposer.spent_s - before)
    assert len(proposer.pieces) > 10 and sum(proposer.pieces) >= 2500
    assert longest_s <= 2 * _STEP.plain
    assert proposer.calls[-1][1] > 2


def test_long_prompt_is_not_computed_for_short_answers() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(_right, clock, ProposalCost(0.0, 0.5, 0.05))
    replica = Replica(clock, m=proposer)
    replica.steps(50)
    for _ in range(200):
        replica.speculation.finished(sequence_of(range(40), num_prompt_tokens=30))
    proposer.pieces.clear()
    for _ in range(6):
        replica.rows = [_row([i % 50 for i in range(3000)])]
        replica.steps(10)
    assert not proposer.pieces


def test_no_calls_while_lookups_are_right() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(_right, clock, _CHEAP)
    replica = Replica(clock, look=FakeProposer(_right), m=proposer)
    replica.steps(300)
    proposer.calls.clear()
    replica.steps(300)
    assert sum(depth for _, depth in proposer.calls) <= 300 // 16, "only trials"
    other = Replica(clock, look=FakeProposer(_wrong), m=proposer)
    other.steps(100)
    assert other.steps(50) > 2.5, "the proposer that is right must be called"


def test_would_draft_calls_no_model() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(_right, clock, _CHEAP)
    replica = Replica(clock, m=proposer)
    replica.steps(40)
    proposer.calls.clear()
    for row in replica.rows:
        row.tokens.append(_next(row.tokens[-1]))
    assert replica.speculation.would_draft(replica.rows, lambda: _STEP, max_tokens=8) and not proposer.calls
    assert replica.step() and proposer.calls
    dear = StepCost(plain=10.0, token=20.0)
    replica.steps(60, dear)
    awaited = [replica.speculation.would_draft(replica.rows, lambda: dear, max_tokens=8) for _ in range(200)]
    assert not awaited[0] and any(awaited), "would_draft must allow trials"


def test_forget_reaches_model_proposers() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(_right, clock, _CHEAP)
    replica = Replica(clock, m=proposer)
    replica.step()
    row: Sequence = replica.rows[0]
    replica.speculation.forget(row)
    assert proposer.forgotten == [row]
    assert replica.speculation.take_model_s() == pytest.approx(proposer.spent_s) and proposer.spent_s
    assert replica.speculation.take_model_s() == 0.0


def test_no_call_without_useful_offers() -> None:
    chances = [[0.7, 0.5], []]
    price = StepCost(plain=1.0, token=0.1)
    assert plan_call(chances, [], price, 8) is None
    assert plan_call(chances, [CallOffer("m", _CHEAP, [(), ()], [0.0, 0.0])], price, 8) is None
    assert sum(plan_drafts(chances, 2, price, 8)) == 2
