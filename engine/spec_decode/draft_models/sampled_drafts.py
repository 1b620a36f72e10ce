"""Drafted tokens are drawn as the sequence's own will be: at the same number for the same position.

Where the drafting model's distribution is the target's, so is every token. Where they differ, tokens agree as often as
the two cumulative distributions have the same token at a number drawn evenly. Of a model that is little alike, its
likeliest token is right more often than that; so it is learnt, by temperature, which of the two is to be taken.

What may begin a branch instead of a token that was drawn is not the likeliest: the target's cumulative distribution is
moved a little beside the draft's, so that its token is the one that lies beside the number. Instead of the likeliest
token it is the one that was drawn; where nothing is drawn, the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.sampling.params import SamplingRow
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_sampling import DRAWN, GREEDY, LIKELIEST, draw_drafts
from engine.spec_decode.proposer import NOTHING, Proposal, ProposedBranch

# R rows, V vocabulary

NUM_DEGREES = 16  # of confidence
_KEEP = 0.98  # weight of the past at each time that the two are not the same and one of them is right
_EVIDENCE = 4.0  # times more that the likeliest has been right than what was drawn
_BRANCHING = 2  # places at which a second token is looked for: of what is deeper in a draft it would pay still less


class Drawn(NamedTuple):
    """A token, and its kind (see Proposal): how sure the model is."""

    token: int
    kind: int
    second: tuple[int, int] | None = None  # the same of what may be there instead


@dataclass(eq=False, slots=True)
class DrawnDraft:
    """Of one row, place after place."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    is_over: bool = False
    _seconds: list[tuple[int, int, int]] = field(default_factory=list)  # place, token, kind

    def take(self, drawn: Drawn | None) -> int:
        """The next token; None: there is none, and none follows. Returns any that there is."""
        self.is_over |= drawn is None
        if drawn is None or self.is_over:
            return 0
        if drawn.second:
            self._seconds.append((len(self.tokens), *drawn.second))
        self.tokens.append(drawn.token)
        self.kinds.append(drawn.kind)
        return drawn.token

    def proposal(self, *, by_place: bool = False) -> Proposal:
        """by_place: what is said of a place goes behind whatever is before it."""
        if not self.tokens:
            return NOTHING
        branches = [
            ProposedBranch(
                place,
                [token, *(self.tokens[place + 1 :] if by_place else ())],
                [kind, *(self.kinds[place + 1 :] if by_place else ())],
            )
            for place, token, kind in self._seconds
        ]
        return Proposal(self.tokens, self.kinds, branches)


class DrawnTokens:
    """Owned by the step thread. How tokens of sequences are drafted from a model's logits. What is asked of a sequence
    beyond temperature, top-k, top-p and min-p is not asked of its drafts: penalties, rules and grammars judge them when
    they are verified."""

    def __init__(self, *, learns: bool = True) -> None:
        """learns: else every token of who draws is drawn."""
        self._rows: WeakKeyDictionary[Sequence, SamplingRow] = WeakKeyDictionary()
        self._learns = learns
        self._balance: dict[float, float] = {}  # by temperature, in tenths: above 0 where the likeliest is right
        self._said: WeakKeyDictionary[Sequence, tuple[int, int, int]] = WeakKeyDictionary()

    @torch.inference_mode()
    def draw(
        self, logits_RV: Tensor, sequences: Seq[Sequence], place: int, *, ids_V: Tensor | None = None
    ) -> list[Drawn | None]:
        """Of each the token behind so many drafted ones. None where the logits are not finite. Waits for the device.

        logits_RV: fp32, may be overwritten; ids_V: of which tokens they are, on the same device; None: of all. Where
        they ascend, that gives what all would if the others' logits were far below."""
        rows = [self._row(sequence).behind(place) for sequence in sequences]
        kinds = [GREEDY if row.sampling.is_greedy else self._kind(row.sampling.temperature) for row in rows]
        draws = draw_drafts(logits_RV, rows, kinds)
        drawn, shares = draws.tokens_R4[:, 1].tolist(), draws.shares_R2.tolist()
        tokens = (draws.tokens_R4 if ids_V is None else ids_V[draws.tokens_R4.clamp_min(0)]).tolist()
        if place == 0 and self._learns and any(kinds):
            self._learn(sequences, [row[1] for row in tokens], [row[0] for row in tokens])
        found: list[Drawn | None] = []
        for kind, is_drawn, (_, _, token, other), both in zip(kinds, drawn, tokens, shares, strict=True):
            first, second = (NUM_DEGREES * kind + _degree(share) for share in both)
            beside = (other, second) if place < _BRANCHING else None
            found.append(Drawn(token, first, beside) if is_drawn >= 0 else None)
        return found

    def _kind(self, temperature: float) -> int:
        return LIKELIEST if self._balance.get(round(temperature, 1), 0.0) > _EVIDENCE else DRAWN

    def _learn(self, sequences: Seq[Sequence], drawn: Seq[int], likeliest: Seq[int]) -> None:
        """From what became of the last time that each was asked about: both would have been a draft's first token."""
        for sequence, *both in zip(sequences, drawn, likeliest, strict=True):
            if sequence.sampling_row.sampling.is_greedy:
                continue
            position, *before = self._said.get(sequence, (len(sequence.tokens), -1, -1))
            self._said[sequence] = len(sequence.tokens), both[0], both[1]
            if position >= len(sequence.tokens) or before[0] == before[1]:
                continue
            if (token := sequence.tokens[position]) in before:
                key = round(sequence.sampling_row.sampling.temperature, 1)
                gain = 1.0 if token == before[1] else -1.0
                self._balance[key] = self._balance.get(key, 0.0) * _KEEP + gain

    def _row(self, sequence: Sequence) -> SamplingRow:
        row = self._rows.get(sequence)
        if row is None:
            own = sequence.sampling_row
            sampling = replace(
                own.sampling,
                min_tokens=0,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                num_logprobs=None,
                token_rules=None,
            )
            row = self._rows[sequence] = SamplingRow(
                sampling=sampling, seed=own.seed, tokens=sequence.tokens, num_prompt_tokens=own.num_prompt_tokens
            )
        return row


def _degree(share: float) -> int:
    return min(NUM_DEGREES - 1, max(0, int(share * NUM_DEGREES))) if math.isfinite(share) else 0
