"""Timed steps of the loop benchmark: no sequence may end during the measurement."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from benchmarks.engine.loop import running_engine
from benchmarks.engine.random_models import random_runner
from core.types.request import Sampling
from engine.runner.runner import ModelRunner
from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import Proposal
from engine.spec_decode.speculation import Speculation

pytestmark = pytest.mark.usefixtures("one_thread")

_NUM_STEPS, _CONTEXT = 67, 32
_GREEDY = Sampling(temperature=0.0)
_SMALL = {"vocab_size": 256, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


class FakeProposer:
    """Proposer that drafts the same for every row."""

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        return [Proposal([1] * max_tokens, [1] * max_tokens) for _ in sequences]

    def finished(self, sequence: Sequence) -> None:
        pass


@pytest.fixture
def runner() -> ModelRunner:
    changes = _SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}
    return random_runner("llama-8b", num_blocks=64, device="cpu", dtype="float32", changes=changes)


@pytest.mark.parametrize("is_async", [False, True])
def test_every_step_samples_a_token_per_row(is_async: bool, runner: ModelRunner) -> None:
    engine, sequences = running_engine(runner, 2, _CONTEXT, _GREEDY, is_async=is_async)
    for _ in range(_NUM_STEPS):
        assert engine.step().did_work
    assert [len(sequence.tokens) for sequence in sequences] == [_CONTEXT + _NUM_STEPS] * 2


def test_every_step_verifies_drafts_of_each_row(runner: ModelRunner) -> None:
    speculation = Speculation({"fake": FakeProposer()}, max_tokens=3, vocab_size=256, backs_off=False)
    engine, _ = running_engine(runner, 2, _CONTEXT, _GREEDY, speculation=speculation)
    for _ in range(10):
        engine.step()
    assert speculation.counts["fake"].drafted.total() == 10 * 2 * 3
