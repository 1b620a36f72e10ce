"""Drafts by heads on the model's own hidden states: from what the last step has left of each row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from engine.sequence import Sequence
from engine.speculation.proposer import NOTHING, NUM_KINDS, Proposal

_NUM_SHARES = NUM_KINDS // 2  # how sure the heads are, in so many steps; of the first tokens, and of those behind
_FIRST = 2


class HeadRow(NamedTuple):
    """One sequence whose next tokens are to be guessed."""

    token_id: int  # its last
    position: int  # of that
    blocks: Seq[int]  # its table, which has a place for the last token


class HeadDraft(NamedTuple):
    """What heads say of a row: nothing where they do not know what the model has seen of it."""

    tokens: list[int]
    shares: list[float]  # of each, how sure they are, from 0 to 1


class DraftHeads(Protocol):
    """Heads, and what they remember."""

    def knows(self, row: HeadRow, /) -> bool:
        """Whether they can say anything of it."""
        ...

    def draft(self, rows: Seq[HeadRow], max_tokens: int, /) -> list[HeadDraft]: ...


class HeadProposer:
    """Implements Computing. Its kinds: how sure the heads are of the token, early in the draft or late. Nothing is ever
    to be caught up with: what heads need of a sequence, its steps have left."""

    def __init__(self, heads: DraftHeads) -> None:
        self._heads = heads

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        proposals = [NOTHING] * len(sequences)
        asked = [i for i, sequence in enumerate(sequences) if _decodes(sequence)]
        if not asked or max_tokens < 1:
            return proposals
        drafts = self._heads.draft([_row(sequences[i]) for i in asked], max_tokens)
        for i, draft in zip(asked, drafts, strict=True):
            if draft.tokens:
                proposals[i] = Proposal(draft.tokens, [_kind(place, share) for place, share in enumerate(draft.shares)])
        return proposals

    def num_behind(self, sequence: Sequence) -> int | None:
        return 0 if _decodes(sequence) and self._heads.knows(_row(sequence)) else None

    def catch_up(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def finished(self, sequence: Sequence) -> None:
        pass


def _decodes(sequence: Sequence) -> bool:
    """It lacks its last token's KV alone, and nothing of it is coming."""
    is_next_to_last = sequence.num_computed == len(sequence.tokens) - 1 > 0
    return is_next_to_last and bool(sequence.blocks) and not sequence.num_coming


def _row(sequence: Sequence) -> HeadRow:
    return HeadRow(sequence.tokens[-1], len(sequence.tokens) - 1, sequence.blocks)


def _kind(place: int, share: float) -> int:
    return min(int(share * _NUM_SHARES), _NUM_SHARES - 1) + (0 if place < _FIRST else _NUM_SHARES)
