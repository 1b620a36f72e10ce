"""Trying what does not pay takes less than a hundredth of the time, whatever it costs and however weak it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.spec_decode.ask_price import AskPrice
from engine.spec_decode.draft_plan import StepPrice
from engine.spec_decode.purse import Purse
from tests.engine.spec_decode.proposers import FakeClock, FakeComputing, FakeProposer
from tests.engine.spec_decode.test_asking import Replica

_STEPS = 2000
_SHARE = 0.005

_costs = st.floats(0.0, 20.0)


@given(
    steps=st.lists(st.tuples(st.floats(1e-3, 10.0), st.lists(_costs, max_size=3)), max_size=60),
    surprise=st.floats(0.0, 3.0),
)
def test_trials_take_no_more_than_their_share_and_what_lies_there_at_first(
    steps: list[tuple[float, list[float]]], surprise: float
) -> None:
    """In each step some are wanted, and made if they may be; each takes longer than was expected. All in steps."""
    purse, spent = Purse(), 0.0
    assert not purse.can_pay(1e-9), "nobody knows what a step takes"
    for number, (step, wanted) in enumerate(steps, 1):
        purse.earn(step)
        for cost in wanted:
            if purse.can_pay(cost):
                purse.pay(cost * (1 + surprise))
                spent += cost * (1 + surprise) / step
                assert spent <= 1 + _SHARE * number + cost * surprise / step + 1e-6


def test_what_idling_has_saved_is_not_spent_at_once() -> None:
    purse = Purse()
    for _ in range(100_000):
        purse.earn(2.0)
    assert purse.can_pay(128.0) and not purse.can_pay(129.0)


def _guesses(chance: float, seed: int) -> Callable[[Seq[int], int], list[int]]:
    """Each token right so often."""
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
def test_with_drafts_it_is_hardly_ever_slower_than_without(
    kind: str, chance: float, depth: float, token: float, num_rows: int, seed: int
) -> None:
    """depth, token: what a token costs to ask for, and to verify, beside a step. Where what is right just pays for what
    is not, whether it did is chance."""
    clock, price = FakeClock(), StepPrice(plain=10.0, token=10 * token)
    guess = _guesses(chance, seed)
    computing = FakeComputing(guess, clock, AskPrice(0.2, 10 * depth, 0.05))
    methods = {"looks up": {"l": FakeProposer(guess)}, "computes": {"c": computing}}
    methods["both"] = {**methods["looks up"], **methods["computes"]}
    replica = Replica(clock, num_rows, **methods[kind])
    assert replica.steps(_STEPS, price) > 0.98
