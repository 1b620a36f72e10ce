"""DraftScheduler: calls model proposers where they pay, hardly ever where they do not, and tries kinds of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_plan import CallOffer, plan_call, plan_drafts
from engine.spec_decode.step_cost import LearnedProposalCost, ProposalCost, StepCost
from tests.engine.spec_decode.proposers import (
    FakeClock,
    FakeModelProposer,
    FakeProposer,
    Replica,
    growing_row,
    right,
    sequence_of,
    wrong,
)

_STEP = StepCost(plain=10.0, token=0.5)  # one row
_CHEAP = ProposalCost(0.2, 1.0, 0.05)
_DEAR = ProposalCost(0.2, 12.0, 0.05)
_MAX = 6


def _replica(clock: FakeClock, num_rows: int = 1, *, num_tokens: int = 200, **methods: object) -> Replica:
    return Replica(num_rows, clock=clock, num_tokens=num_tokens, max_tokens=_MAX, **methods)


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
    proposer = FakeModelProposer(right, clock, _CHEAP)
    replica = _replica(clock, m=proposer)
    replica.steps(40, _STEP)
    assert replica.steps(100, _STEP) > 2.5
    assert proposer.calls[-1] == (1, _MAX)
    counts = replica.speculation.counts["m"]
    assert counts.accepted.total() == counts.drafted.total() > 500


@pytest.mark.parametrize(
    ("guess", "price"),
    [(wrong, _CHEAP), (wrong, _DEAR), (wrong, ProposalCost(0.2, 0.1, 0.01)), (right, _DEAR)],
    ids=["wrong", "wrong and dear", "wrong and cheap", "dear"],
)
def test_unprofitable_proposer_costs_next_to_nothing(guess: type, price: ProposalCost) -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(guess, clock, price)
    replica = _replica(clock, m=proposer)
    replica.steps(100, _STEP)
    longest_s = price.seconds(4, 4)
    assert proposer.spent_s <= _STEP.plain * (1 + 0.005 * 100) + longest_s, "exploration must be bounded"
    assert replica.steps(3000, _STEP) > 0.993
    assert len(proposer.calls) > 5, "trials must continue, to notice an improvement"
    assert proposer.spent_s < 0.006 * replica.seconds


def test_unprofitable_proposer_rests_with_trials_early_in_answers() -> None:
    clock, is_right = FakeClock(), [False]
    tried: list[int] = []
    planned: list[int] = []

    def guess(tokens: Seq[int], most: int) -> list[int]:
        tried.append(len(tokens) - 1)
        return (right if is_right[0] else wrong)(tokens, most)

    def knows(sequence: Sequence) -> bool:
        planned.append(sequence.num_generated)
        return not proposer.rests or sequence.num_generated < 32

    proposer = FakeModelProposer(guess, clock, ProposalCost(0.2, 0.5, 0.01), can_guess=knows)
    replica = _replica(clock, m=proposer)
    assert proposer.rests, "a proposer rests until a call pays"
    replica.steps(400, _STEP)
    assert tried and proposer.rests
    tried.clear()
    planned.clear()
    replica.steps(6000, _STEP)
    assert proposer.rests and len(tried) > 10
    assert sum(place > 16 for place in planned) <= 6000 // 32, "plans after the first tokens of an answer must be rare"
    assert max(tried) < 32 and len(set(tried)) > 2, "trials must vary in position"
    num_gathered = 0
    for _ in range(3000):
        replica.steps(1, _STEP)
        num_gathered += proposer.num_first is None or replica.rows[0].num_generated <= proposer.num_first
    assert 0 < num_gathered < 300, "it must not collect state while no trial is due"
    is_right[0] = True
    replica.steps(1000, _STEP)
    assert not proposer.rests and replica.steps(100, _STEP) > 1.5
    is_right[0] = False
    replica.steps(3000, _STEP)
    assert proposer.rests


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(4, 20), (1, 100)])
def test_resting_proposer_wakes_when_it_becomes_right(num_rows: int, num_tokens: int) -> None:
    """Although it has no state of the tokens that it has missed."""
    for others in range(0, 200, 74):
        clock, is_right = FakeClock(), [False]

        def guess(tokens: Seq[int], most: int, is_right: list[bool] = is_right) -> list[int]:
            return (right if is_right[0] else wrong)(tokens, most)

        proposer = FakeModelProposer(guess, clock, ProposalCost(0.2, 0.5, 0.01))
        replica = _replica(clock, num_rows, num_tokens=num_tokens, m=proposer)
        replica.steps(3000 + others, _STEP)
        assert proposer.rests
        is_right[0] = True
        replica.steps(400 if num_tokens == 20 else 600, _STEP)
        assert not proposer.rests


def test_resting_proposer_is_tried_with_short_answers() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(wrong, clock, ProposalCost(0.2, 0.5, 0.01))
    replica = _replica(clock, num_tokens=4, m=proposer)
    replica.steps(6000, _STEP)
    proposer.calls.clear()
    replica.steps(6000, _STEP)
    assert proposer.rests and len(proposer.calls) > 6


def test_calls_are_rare_when_draft_tokens_are_expensive() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(right, clock, ProposalCost(0.0, 0.2, 0.3))
    replica = _replica(clock, num_rows=4, m=proposer)
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
        return (right if sum(tokens[:1]) % 2 else wrong)(tokens, most)  # the first token of a row never changes

    proposer = FakeModelProposer(guess, clock, ProposalCost(0.0, 0.2, 0.3))
    replica = _replica(clock, num_rows=4, m=proposer)
    replica.steps(60, _STEP)
    proposer.calls.clear()
    replica.steps(20, _STEP)
    assert proposer.calls[-1][0] == 2


def test_rows_that_cannot_be_proposed_for_are_not_called() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(right, clock, _CHEAP, can_guess=lambda sequence: sequence.tokens[0] == 1)
    replica = _replica(clock, num_rows=3, m=proposer)
    replica.steps(60, _STEP)
    assert {num_rows for num_rows, _ in proposer.calls} == {1}


def test_long_prompt_catches_up_in_pieces() -> None:
    clock, price = FakeClock(), ProposalCost(0.0, 0.5, 0.05)
    proposer = FakeModelProposer(right, clock, price)
    replica = _replica(clock, m=proposer)
    replica.steps(50, _STEP)
    replica.rows = [growing_row([i % 50 for i in range(3000)])]
    longest_s = 0.0
    for _ in range(120):
        before = proposer.spent_s
        replica.step(_STEP)
        longest_s = max(longest_s, proposer.spent_s - before)
    assert len(proposer.pieces) > 10 and sum(proposer.pieces) >= 2500
    assert longest_s <= 2 * _STEP.plain
    assert proposer.calls[-1][1] > 2


def test_long_prompt_is_not_computed_for_short_answers() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(right, clock, ProposalCost(0.0, 0.5, 0.05))
    replica = _replica(clock, m=proposer)
    replica.steps(50, _STEP)
    for _ in range(200):
        replica.speculation.finished(sequence_of(range(40), num_prompt_tokens=30))
    proposer.pieces.clear()
    for _ in range(6):
        replica.rows = [growing_row([i % 50 for i in range(3000)])]
        replica.steps(10, _STEP)
    assert not proposer.pieces


def test_no_calls_while_lookups_are_right() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(right, clock, _CHEAP)
    replica = _replica(clock, look=FakeProposer(right), m=proposer)
    replica.steps(300, _STEP)
    proposer.calls.clear()
    replica.steps(300, _STEP)
    assert sum(depth for _, depth in proposer.calls) <= 300 // 16, "only trials"
    other = _replica(clock, look=FakeProposer(wrong), m=proposer)
    other.steps(100, _STEP)
    assert other.steps(50, _STEP) > 2.5, "the proposer that is right must be called"


def test_would_draft_calls_no_model() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(right, clock, _CHEAP)
    replica = _replica(clock, m=proposer)
    replica.steps(40, _STEP)
    proposer.calls.clear()
    for row in replica.rows:
        row.tokens += right(row.tokens, 1)
    assert replica.speculation.would_draft(replica.rows, lambda: _STEP, max_tokens=8) and not proposer.calls
    assert replica.step(_STEP) and proposer.calls
    dear = StepCost(plain=10.0, token=20.0)
    replica.steps(60, dear)
    awaited = [replica.speculation.would_draft(replica.rows, lambda: dear, max_tokens=8) for _ in range(200)]
    assert not awaited[0] and any(awaited), "would_draft must allow trials"


def test_forget_reaches_model_proposers() -> None:
    clock = FakeClock()
    proposer = FakeModelProposer(right, clock, _CHEAP)
    replica = _replica(clock, m=proposer)
    replica.step(_STEP)
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


_STEPS = 2000


@settings(max_examples=6, deadline=None)
@given(share=st.floats(0.0, 0.7), num_rows=st.sampled_from([1, 4]), token=st.floats(0.1, 0.24), seed=st.integers(0, 99))
def test_after_warm_up_proposals_below_break_even_are_not_drafted(
    share: float, num_rows: int, token: float, seed: int
) -> None:
    """share: acceptance rate relative to break-even."""
    cost = StepCost(plain=10.0, token=10 * token)
    replica = Replica(num_rows, num_tokens=200, max_tokens=6, l=_guesses(share * cost.break_even(num_rows), seed))
    replica.steps(400, cost)
    num_tokens = sum(replica.num_drafted(cost) for _ in range(640))
    assert num_tokens <= 0.02 * 640 * num_rows + 3 * 10


@settings(max_examples=6, deadline=None)
@given(num_wrong=st.integers(0, 400), num_rows=st.sampled_from([1, 4, 9]))
def test_a_change_of_the_text_is_noticed_within_a_few_steps(num_wrong: int, num_rows: int) -> None:
    chance = [0.0]

    def guess(tokens: Seq[int], max_tokens: int) -> list[int]:
        return (right if chance[0] else wrong)(tokens, max_tokens)

    cost = StepCost(plain=10.0, token=0.2)
    replica = Replica(num_rows, max_tokens=6, l=guess)
    replica.steps(1 + num_wrong, cost)
    chance[0] = 1.0
    replica.steps(200, cost)
    assert replica.steps(20, cost) > 2.0


def _guesses(chance: float, seed: int) -> Callable[[Seq[int], int], list[int]]:
    """Return a guess function whose tokens are right with this probability."""
    generator = random.Random(seed)

    def guess(tokens: Seq[int], max_tokens: int) -> list[int]:
        found, last = list[int](), list(tokens[-1:])
        for _ in range(max_tokens):
            last = right(last, 1)
            found += last if generator.random() < chance else [(last[0] + 1) % 50]
        return found

    return guess


@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(["looks up", "computes", "both"]),
    chance=st.floats(0.0, 0.6),
    depth=st.floats(0.02, 1.5),
    token=st.floats(0.02, 0.5),
    num_rows=st.sampled_from([1, 4]),
    seed=st.integers(0, 1 << 20),
)
@pytest.mark.timeout(300)
def test_drafts_are_hardly_ever_slower(
    kind: str, chance: float, depth: float, token: float, num_rows: int, seed: int
) -> None:
    """depth, token: cost of proposing and of verifying a token, relative to a step.

    At break-even the outcome is chance.
    """
    clock, price = FakeClock(), StepCost(plain=10.0, token=10 * token)
    guess = _guesses(chance, seed)
    models = FakeModelProposer(guess, clock, ProposalCost(0.2, 10 * depth, 0.05))
    methods = {"looks up": {"l": guess}, "computes": {"c": models}}
    methods["both"] = {**methods["looks up"], **methods["computes"]}
    replica = Replica(num_rows, clock=clock, num_tokens=200, max_tokens=6, **methods[kind])
    assert replica.steps(_STEPS, price) > 0.98
