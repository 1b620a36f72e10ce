"""Drafts by heads on the model's own hidden states: from what the last step has left of each row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol

from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.sampled_drafts import DrawnDraft, DrawnTokens
from engine.spec_decode.heads.head_row import Choose, HeadLogits, HeadRow
from engine.spec_decode.proposer import Proposal


class AskedHeads(Protocol):
    """Heads, and what they remember: a rank that is alone."""

    def num_behind(self, row: HeadRow, /) -> int | None: ...

    def catch_up(self, rows: Seq[HeadRow], max_tokens: int | None = None, /) -> None: ...

    def rest(self, num_first: int | None, /) -> None: ...

    def draft(self, rows: Seq[HeadRow], max_tokens: int, choose: Choose, /) -> None: ...


class HeadProposer:
    """Implements Computing. What heads need of a sequence, its steps have left, or what came with its KV: there is
    something to be caught up with only while they rest. Tokens are drawn as the sequence's own will be."""

    def __init__(self, heads: AskedHeads, drawn: DrawnTokens | None = None, *, by_place: bool = False) -> None:
        """drawn: None, with what it will learn itself. by_place: what the heads say of a place does not depend on the
        drafted tokens before it."""
        self._heads = heads
        self._drawn = drawn or DrawnTokens()
        self._by_place = by_place

    def num_behind(self, sequence: Sequence) -> int | None:
        return self._heads.num_behind(_row(sequence)) if _decodes(sequence) else None

    def catch_up(self, sequence: Sequence, num_tokens: int) -> None:
        self._heads.catch_up([_row(sequence)], num_tokens)

    def rest(self, num_first: int | None) -> None:
        self._heads.rest(num_first)

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        drafts = [(sequence, DrawnDraft()) for sequence in sequences]
        asked = [(sequence, draft) for sequence, draft in drafts if _decodes(sequence)]
        if asked and max_tokens > 0:
            self._heads.draft([_row(sequence) for sequence, _ in asked], max_tokens, partial(self._choose, asked))
        return [draft.proposal(by_place=self._by_place) for _, draft in drafts]

    def forget(self, sequence: Sequence) -> None:
        pass

    def finished(self, sequence: Sequence) -> None:
        pass

    def _choose(
        self, asked: Seq[tuple[Sequence, DrawnDraft]], logits: HeadLogits, rows: Seq[int], place: int
    ) -> list[int]:
        going_on = [asked[row] for row in rows]
        drawn = self._drawn.draw(logits.values_RD, [sequence for sequence, _ in going_on], place, ids_V=logits.ids_D)
        return [draft.take(token) for (_, draft), token in zip(going_on, drawn, strict=True)]


def _decodes(sequence: Sequence) -> bool:
    """It lacks its last token's KV alone, and nothing of it is coming."""
    is_next_to_last = sequence.num_computed == len(sequence.tokens) - 1 > 0
    return is_next_to_last and bool(sequence.blocks) and not sequence.num_in_flight


def _row(sequence: Sequence) -> HeadRow:
    return HeadRow(sequence.tokens[-1], len(sequence.tokens) - 1, sequence.blocks)
