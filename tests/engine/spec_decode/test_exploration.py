"""Properties of the rule: no draft at an expected loss, bounded exploration, recovery after a change of the text."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.spec_decode.draft_plan import CallOffer, plan_call, plan_drafts
from engine.spec_decode.step_cost import ProposalCost, StepCost
from tests.engine.spec_decode.proposers import FakeClock, FakeModelProposer, FakeProposer
from tests.engine.spec_decode.test_draft_scheduler import Replica

_STEPS = 2000

_chances = st.lists(st.floats(0.0, 1.0), max_size=6).map(lambda each: list(accumulate(each, mul)))
_step_costs = st.builds(
    StepCost, plain=st.floats(0.5, 50.0), token=st.floats(0.0, 5.0), factors=st.tuples(st.floats(1.0, 1.5))
)


def _rate(chances: Seq[Seq[float]], lengths: Seq[int], cost: StepCost, call_s: float = 0.0) -> float:
    expected = sum(sum(row[:length]) for row, length in zip(chances, lengths, strict=True))
    return (len(chances) + expected) / (cost.step(sum(lengths)) + call_s)


@given(chances=st.lists(_chances, min_size=1, max_size=5), cost=_step_costs, max_tokens=st.integers(0, 20))
def test_nothing_is_drafted_at_an_expected_loss(chances: list[list[float]], cost: StepCost, max_tokens: int) -> None:
    lengths = plan_drafts(chances, len(chances), cost, max_tokens)
    assert sum(lengths) <= max_tokens
    assert not any(lengths) or _rate(chances, lengths, cost) > len(chances) / cost.plain


@given(
    rows=st.lists(st.tuples(_chances, _chances, st.floats(0.0, 50.0)), min_size=1, max_size=5),
    price=st.builds(ProposalCost, st.floats(0.0, 5.0), st.floats(0.0, 5.0), st.floats(0.0, 1.0)),
    cost=_step_costs,
    max_tokens=st.integers(1, 20),
)
def test_no_model_is_called_at_an_expected_loss(
    rows: list[tuple[list[float], list[float], float]], price: ProposalCost, cost: StepCost, max_tokens: int
) -> None:
    known, expected, missing = map(list, zip(*rows, strict=True))
    before = _rate(known, plan_drafts(known, len(rows), cost, max_tokens), cost)
    call = plan_call(known, [CallOffer("m", price, expected, missing)], cost, max_tokens)
    if call is not None:
        after = [expected[row][: call.depth] if row in call.rows else chances for row, chances in enumerate(known)]
        lengths = plan_drafts(after, len(rows), cost, max_tokens)
        call_s = price.seconds(call.depth, sum(missing[row] + call.depth - 1 for row in call.rows))
        assert _rate(after, lengths, cost, call_s) > before


@settings(max_examples=15, deadline=None)
@given(share=st.floats(0.0, 0.7), num_rows=st.sampled_from([1, 4]), token=st.floats(0.1, 0.24), seed=st.integers(0, 99))
def test_after_warm_up_proposals_below_break_even_are_not_drafted(
    share: float, num_rows: int, token: float, seed: int
) -> None:
    """share: acceptance rate relative to break-even."""
    cost = StepCost(plain=10.0, token=10 * token)
    replica = Replica(FakeClock(), num_rows, l=FakeProposer(_guesses(share * cost.break_even(num_rows), seed)))
    replica.steps(400, cost)
    num_tokens = sum(replica.step(cost) for _ in range(640))
    assert num_tokens <= 0.02 * 640 * num_rows + 3 * 10


@settings(max_examples=15, deadline=None)
@given(num_wrong=st.integers(0, 400), num_rows=st.sampled_from([1, 4, 9]))
def test_a_change_of_the_text_is_noticed_within_a_few_steps(num_wrong: int, num_rows: int) -> None:
    chance = [0.0]

    def guess(tokens: Seq[int], max_tokens: int) -> list[int]:
        found = list(tokens[-1:])
        for _ in range(max_tokens):
            found.append((found[-1] * 7 + 3) % 50)
        return found[1:] if chance[0] else [(token + 1) % 50 for token in found[1:]]

    cost = StepCost(plain=10.0, token=0.2)
    replica = Replica(FakeClock(), num_rows, num_tokens=100_000, l=FakeProposer(guess))
    replica.steps(1 + num_wrong, cost)
    chance[0] = 1.0
    replica.steps(200, cost)
    assert replica.steps(20, cost) > 2.0


def _guesses(chance: float, seed: int) -> Callable[[Seq[int], int], list[int]]:
    """Return a guess function whose tokens are right with this probability."""
    generator = random.Random(seed)

    def guess(tokens: Seq[int], max_tokens: int) -> list[int]:
        found, right = list[int](), tokens[-1]
        for _ in range(max_tokens):
            right = (right * 7 + 3) % 50
            found.append(right if generator.random() < chance else (right + 1) % 50)
        return found

    return guess


@settings(max_examples=20, deadline=None)
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
    methods = {"looks up": {"l": FakeProposer(guess)}, "computes": {"c": models}}
    methods["both"] = {**methods["looks up"], **methods["computes"]}
    replica = Replica(clock, num_rows, **methods[kind])
    assert replica.steps(_STEPS, price) > 0.98
