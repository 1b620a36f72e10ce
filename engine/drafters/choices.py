"""The tokens that heads choose for several rows, place after place."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch.rows import Ints
from engine.speculation.head_proposer import HeadDraft

# R rows of which something is known, D tokens that the heads know


class HeadChoices:
    """The likeliest token of each row, and its share."""

    def __init__(self, num_rows: int, known: Ints) -> None:
        """known: which rows are chosen for; the others get nothing."""
        self._num_rows = num_rows
        self._known = known
        self._tokens: list[Tensor] = []
        self._shares: list[Tensor] = []

    def add(self, logits_RD: Tensor, *, offsets_D: Tensor | None = None) -> Tensor:
        """Of the next place; (R,) the model's ids. offsets: from the heads' ids to those; None: they are the same."""
        logits_RD = logits_RD.float()
        best_R, tokens_R = logits_RD.max(dim=-1)
        self._shares.append((best_R - logits_RD.logsumexp(dim=-1)).exp())
        if offsets_D is not None:
            tokens_R = tokens_R + offsets_D[tokens_R]
        self._tokens.append(tokens_R)
        return tokens_R

    def drafts(self) -> list[HeadDraft]:
        """Of all rows. Waits for the device."""
        drafts = [HeadDraft([], []) for _ in range(self._num_rows)]
        if self._tokens:
            tokens, shares = torch.stack(self._tokens, dim=1).tolist(), torch.stack(self._shares, dim=1).tolist()
            for row, its_tokens, its_shares in zip(self._known.tolist(), tokens, shares, strict=True):
                drafts[row] = HeadDraft(its_tokens, its_shares)
        return drafts
