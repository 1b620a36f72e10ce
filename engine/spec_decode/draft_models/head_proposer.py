"""Model proposer by draft heads on the served model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol

from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.draft_sampler import DraftSampler, RowDraft
from engine.spec_decode.heads.head_row import Choose, HeadLogits, HeadRow
from engine.spec_decode.proposer import Proposal


class RankHeads(Protocol):
    """Heads and their state: of one rank, or of all ranks of a replica."""

    def num_behind(self, row: HeadRow, /) -> int | None: ...

    def catch_up(self, rows: Seq[HeadRow], max_tokens: int | None = None, /) -> None: ...

    def rest(self, num_first: int | None, /) -> None: ...

    def draft(self, rows: Seq[HeadRow], max_tokens: int, choose: Choose, /) -> None: ...


class HeadProposer:
    """ModelProposer by heads.

    Steps, or the KV that arrives, leave what heads need of a sequence, so only resting heads have to catch up.
    """

    def __init__(self, heads: RankHeads, sampler: DraftSampler | None = None) -> None:
        """sampler: None for a new one."""
        self._heads = heads
        self._sampler = sampler or DraftSampler()

    def num_behind(self, sequence: Sequence) -> int | None:
        return self._heads.num_behind(_row(sequence)) if _decodes(sequence) else None

    def catch_up(self, sequence: Sequence, num_tokens: int) -> None:
        self._heads.catch_up([_row(sequence)], num_tokens)

    def rest(self, num_first: int | None) -> None:
        self._heads.rest(num_first)

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        drafts = [(sequence, RowDraft()) for sequence in sequences]
        called = [(sequence, draft) for sequence, draft in drafts if _decodes(sequence)]
        if called and max_tokens > 0:
            self._heads.draft([_row(sequence) for sequence, _ in called], max_tokens, partial(self._choose, called))
        return [draft.proposal() for _, draft in drafts]

    def forget(self, sequence: Sequence) -> None:
        pass

    def finished(self, sequence: Sequence) -> None:
        pass

    def _choose(
        self, called: Seq[tuple[Sequence, RowDraft]], logits: HeadLogits, rows: Seq[int], place: int
    ) -> list[int]:
        drafting = [called[row] for row in rows]
        sequences = [sequence for sequence, _ in drafting]
        tokens = self._sampler.draw(logits.values_RD, sequences, place, ids_V=logits.ids_D)
        return [draft.take(token) for (_, draft), token in zip(drafting, tokens, strict=True)]


def _decodes(sequence: Sequence) -> bool:
    """Return whether only the last token's KV is missing, and none is in flight."""
    is_next_to_last = sequence.num_computed == len(sequence.tokens) - 1 > 0
    return is_next_to_last and bool(sequence.blocks) and not sequence.num_in_flight


def _row(sequence: Sequence) -> HeadRow:
    return HeadRow(sequence.tokens[-1], len(sequence.tokens) - 1, sequence.blocks)
