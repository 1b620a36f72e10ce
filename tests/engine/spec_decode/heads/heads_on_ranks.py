"""Functions that run on ranks in separate processes: drafts of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.model.draft_heads import HeadsKind, HeadsPlace
from core.types.request import Sampling
from engine.batch.batch import Batch
from engine.batch.rows import Row, RowChanges
from engine.runner.parallel import TensorParallel
from engine.scheduler.step_commands import Orders
from engine.spec_decode.draft_models.draft_model import HeadProposer
from engine.spec_decode.heads.head_row import HeadRow
from engine.spec_decode.speculation import Speculation
from tests.engine.engine_requests import Asked, answers
from tests.engine.gang_answers import Leader, gang_of
from tests.engine.spec_decode.proposers import Recorded, draft_logits
from tests.engine.steps import VOCAB_SIZE, prompts
from worker.gang_runner import GangRunner

_NUM_TOKENS = 3

Guesses = dict[tuple[int, ...], list[int]]  # by the tokens before


def drafts_of_answers(
    parallel: TensorParallel, directory: Path, kind: HeadsKind, heads: Path
) -> tuple[list[list[int]], Guesses] | None:
    """Return rank 0's answers and all drafts, for choices that fork inside a block, greedy and sampled."""
    gang = gang_of(parallel, directory, max_running=24, heads=HeadsPlace(kind, heads))
    if parallel.rank:
        gang.follow()
        return None
    samplings = [Sampling(max_tokens=20 + i, temperature=0.8 * (i % 2), seed=i) for i in range(4)]
    asked = [Asked(prompt, samplings[i], num_choices=1 + i % 2) for i, prompt in enumerate(prompts(3, 21, 9, 40))]
    recorded, leader = Recorded(HeadProposer(gang), _NUM_TOKENS), Leader(gang)
    speculation = Speculation({"heads": recorded}, max_tokens=_NUM_TOKENS, vocab_size=VOCAB_SIZE)
    outputs = answers(leader, asked, speculation=speculation)  # type: ignore[arg-type]
    gang.execute(None, Orders(stop=True))
    return outputs.ids, recorded.drafts


def drafts_after_transfer(
    parallel: TensorParallel, directory: Path, kind: HeadsKind, heads: Path
) -> list[Tensor] | None:
    """Return the logits of drafts before and after a step that continues from received KV.

    The KV of two blocks is copied to two others, as if it had arrived with features that no rank here has computed.
    """
    gang = gang_of(parallel, directory, max_running=24, heads=HeadsPlace(kind, heads))
    if parallel.rank:
        gang.follow()
        return None
    tokens, logits = prompts(13)[0], list[Tensor]()

    _step(gang, tokens[:11], 0, [0, 1], number=1)
    gang.execute(None, Orders(copies=[(0, 4), (1, 5)]))
    gang.arrived([4, 5], 0, 11, b"")
    assert not gang.runner.heads.knows([HeadRow(tokens[11], 11, [4, 5])])
    features = torch.randn(48, generator=torch.Generator().manual_seed(3))
    gang.arrived([4, 5], 0, 11, features.numpy().tobytes())
    logits += draft_logits(gang, [HeadRow(tokens[11], 11, [4, 5])], _NUM_TOKENS)
    _step(gang, tokens[11:12], 11, [4, 5], number=2)
    logits += draft_logits(gang, [HeadRow(tokens[12], 12, [4, 5])], _NUM_TOKENS)
    gang.execute(None, Orders(stop=True))
    return logits


def _step(gang: GangRunner, token_ids: list[int], start: int, blocks: list[int], *, number: int) -> None:
    row = Row(token_ids, start, blocks, num_logits=1)
    step: Any = _Step(row, number)
    gang.execute(step, Orders())


class _Step:
    """Step of one row, with the attributes that a gang reads."""

    def __init__(self, row: Row, number: int) -> None:
        self.batch = Batch.of([row], block_size=8)
        self.changes = RowChanges.of([row], block_size=8)
        self.scored: list[object] = []
        self.device_tokens = None
