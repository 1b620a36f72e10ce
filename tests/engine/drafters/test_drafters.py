"""What heads guess is what their papers say, however a sequence came to where it is; and answers stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from cluster.words.request import Sampling
from engine.engine import SchedulerConfig
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.speculation.head_proposer import HeadProposer
from engine.speculation.speculation import Speculation
from tests.engine.asked import Asked, answers
from tests.engine.drafters.head_files import eagle_reference, medusa_reference, write_eagle, write_medusa
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

_NUM_TOKENS = 4
_SMALL = SchedulerConfig(max_batch_tokens=48, max_running=24, max_waiting=32)

Reference = Callable[[list[int]], list[int]]


class Case:
    """A model, its heads, and what they say by definition."""

    def __init__(self, runner: ModelRunner, reference: Reference) -> None:
        self.runner, self.reference = runner, reference


@pytest.fixture(params=["medusa", "eagle"])
def case(request: pytest.FixtureRequest, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path) -> Case:
    return _case(request.param, tiny_model, make_runner, tmp_path)


def _case(kind: str, tiny_model: MakeModel, make_runner: MakeRunner, directory: Path, **config: Any) -> Case:
    model_dir, model = tiny_model("llama")
    reference = _medusa(model, directory) if kind == "medusa" else _eagle(model, directory)
    runner = make_runner(model_dir, **({"num_blocks": 512} | config), drafter=kind, drafter_dir=directory)
    return Case(runner, reference)


def _medusa(model: PreTrainedModel, directory: Path) -> Reference:
    tensors = write_medusa(directory)
    return lambda tokens: medusa_reference(model, tensors, tokens)


def _eagle(model: PreTrainedModel, directory: Path) -> Reference:
    tensors = write_eagle(directory)
    return lambda tokens: eagle_reference(model, tensors, tokens, _NUM_TOKENS, layers=(0, 1, 2))


class Checked:
    """Implements Proposer: asked for every row of every step, it looks whether heads say what they are to say."""

    def __init__(self, case: Case) -> None:
        self._case, self._heads = case, HeadProposer(case.runner)
        self.num_checked = 0
        self.num_empty = 0

    def propose(self, sequences: Any, max_tokens: int) -> Any:
        proposals = self._heads.propose(sequences, _NUM_TOKENS)
        for sequence, proposal in zip(sequences, proposals, strict=True):
            if proposal.tokens:
                assert list(proposal.tokens) == self._case.reference(list(sequence.tokens))
                self.num_checked += 1
            else:
                self.num_empty += 1
        return proposals

    def finished(self, sequence: Sequence) -> None:
        pass


@pytest.fixture
def asked() -> list[Asked]:
    every = prompts(3, 21, 9, 40, 33, 17)
    samplings = [Sampling(max_tokens=20 + i, temperature=0.8 * (i % 2), seed=i) for i in range(len(every))]
    return [
        Asked(prompt, sampling, num_choices=1 + i % 2)
        for i, (prompt, sampling) in enumerate(zip(every, samplings, strict=True))
    ]


@pytest.mark.parametrize("num_blocks", [512, 30])
def test_what_is_guessed_follows_from_the_tokens_and_answers_do_not(
    case: Case, asked: list[Asked], num_blocks: int
) -> None:
    """Prompts in chunks, choices that fork inside a block, rejected drafts at the ends of blocks, preemption."""
    expected = answers(case.runner, asked)
    checked = Checked(case)
    speculation = Speculation({"heads": checked}, max_tokens=_NUM_TOKENS, vocab_size=VOCAB_SIZE)
    found = answers(case.runner, asked, _SMALL, num_blocks, speculation=speculation)
    assert found.ids == expected.ids
    assert bool(found.num_preemptions) == (num_blocks == 30)
    assert checked.num_checked > 100 and not checked.num_empty
