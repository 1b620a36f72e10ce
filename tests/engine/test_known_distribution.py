"""Answers and drafts of known distributions: answers keep theirs, and acceptance rates match the theory."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from core.types.request import Sampling
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.spec_decode.draft_models.draft_sampler import DraftSampler, RowDraft
from engine.spec_decode.proposer import Proposal
from engine.spec_decode.speculation import Speculation
from tests.engine.asked import Asked, sequence_of
from tests.engine.chi_square import chi_square

# V vocabulary

_VOCAB = 40
_ROWS, _TOKENS = 250, 40  # 10,000 draws
_DEPTH = 2


class _FakeModel:
    """Runner whose logits are the same after any tokens."""

    def __init__(self, logits_V: Tensor) -> None:
        self._logits_V = logits_V

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> Tensor | None:
        return self._logits_V.repeat(len(step.batch.logits_rows), 1) if step else None


class _Drawing:
    """Proposer that samples from its own distribution, as models and heads do."""

    def __init__(self, logits_V: Tensor) -> None:
        self._logits_V = logits_V
        self._drawn = DraftSampler(learns=False)

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        drafts = [RowDraft() for _ in sequences]
        for place in range(_DEPTH):
            drawn = self._drawn.draw(self._logits_V.repeat(len(sequences), 1), sequences, place)
            for draft, token in zip(drafts, drawn, strict=True):
                draft.take(token)
        return [draft.proposal() for draft in drafts]

    def finished(self, sequence: Sequence) -> None:
        pass


def _expected_acceptance(p_V: Tensor, q_V: Tensor) -> float:
    """Return how often tokens of p and q drawn with the same number agree."""
    numbers = (torch.arange(100_000).double() + 0.5) / 100_000
    chosen = torch.searchsorted(p_V.cumsum(0), numbers).clamp_max(_VOCAB - 1)
    drafted = torch.searchsorted(q_V.cumsum(0), numbers).clamp_max(_VOCAB - 1)
    return float((chosen == drafted).double().mean())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_drafts_keep_the_distribution_and_match_expected_acceptance(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    target_V = torch.randn(_VOCAB, generator=generator) * 2
    draft_V = target_V + torch.randn(_VOCAB, generator=generator) * 0.6
    speculation = Speculation({"q": _Drawing(draft_V)}, max_tokens=_DEPTH, vocab_size=_VOCAB)
    blocks = BlockManager(_ROWS * 16)
    config = SchedulerConfig(max_batch_tokens=1 << 14, max_running=1 << 12, max_waiting=_ROWS)
    engine = Engine(_FakeModel(target_V), sample, blocks, config, block_size=8, speculation=speculation)
    asked = [Asked([1, 2, 3], Sampling(temperature=temperature, seed=i, max_tokens=_TOKENS)) for i in range(_ROWS)]
    sequences = [sequence_of(one, str(i), block_size=8) for i, one in enumerate(asked)]
    for sequence in sequences:
        engine.add(Prompt(sequence))
    while engine.step().did_work:
        blocks.check_integrity()
    outputs = [token for sequence in sequences for token in sequence.tokens[3:]]
    p_V, q_V = ((logits_V.double() / temperature).softmax(-1) for logits_V in (target_V, draft_V))
    assert len(outputs) == _ROWS * _TOKENS
    assert chi_square(outputs, p_V) < 4, "drafts must not change the distribution"
    assert chi_square(outputs, q_V) > 6, "the test must distinguish the distributions"
    share, counts = _expected_acceptance(p_V, q_V), speculation.counts["q"]
    drafted, right = counts.drafted[0], counts.accepted[0]
    assert drafted > 3000
    assert abs(right / drafted - share) < 4 * math.sqrt(share * (1 - share) / drafted)
