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

from engine.likeliest import likeliest, likeliest_two
from engine.sampler import sample, uniform
from engine.sampling import SamplingRow
from engine.sequence import Sequence
from engine.speculation.proposer import NOTHING, Proposal, ProposedBranch

# R rows, V vocabulary

NUM_DEGREES = 16  # of confidence
_GREEDY, _DRAWN, _LIKELIEST = range(3)  # kinds of tokens: of who draws none; of who does, drawn, and not
_KEEP = 0.98  # weight of the past at each time that the two are not the same and one of them is right
_EVIDENCE = 4.0  # times more that the likeliest has been right than what was drawn
_BRANCHING = 2  # places at which a second token is looked for: of what is deeper in a draft it would pay still less
_NEARBY = 0.05  # of the number: so far the target's distribution may be moved


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
        if all(sequence.sampling_row.sampling.is_greedy for sequence in sequences):
            return _greedy(logits_RV, ids_V, has_second=place < _BRANCHING)
        rows = [self._row(sequence).behind(place) for sequence in sequences]
        temperatures = [1.0 if row.sampling.is_greedy else row.sampling.temperature for row in rows]
        given_RV = logits_RV / torch.tensor(temperatures, device=logits_RV.device).unsqueeze(-1)
        log_norms_R1 = given_RV.logsumexp(dim=-1, keepdim=True)
        likeliest_R = given_RV.argmax(dim=-1)
        drawn_R = torch.as_tensor(sample(logits_RV, rows).token_ids, device=logits_RV.device).long()
        if place == 0 and self._learns:
            ids = [_ids(places_R, ids_V).tolist() for places_R in (drawn_R.clamp_min(0), likeliest_R)]
            self._learn(sequences, *ids)
        kinds = [_GREEDY if row.sampling.is_greedy else self._kind(row.sampling.temperature) for row in rows]
        takes_likeliest_R = torch.tensor([kind == _LIKELIEST for kind in kinds], device=logits_RV.device)
        places_R = torch.where(takes_likeliest_R, likeliest_R, drawn_R.clamp_min(0))
        chances_R = (given_RV.gather(-1, places_R.unsqueeze(-1)) - log_norms_R1).exp().squeeze(-1)
        second = None
        if place < _BRANCHING:
            draws = torch.tensor([[uniform(row.seed, row.position)] for row in rows], device=logits_RV.device)
            second = _beside(given_RV, log_norms_R1, places_R, draws)
            is_greedy_R = torch.tensor([kind == _GREEDY for kind in kinds], device=logits_RV.device)
            seconds_R, next_R = _second(given_RV, places_R)
            is_other_R = takes_likeliest_R & (drawn_R >= 0) & (drawn_R != likeliest_R)
            seconds_R = torch.where(is_other_R, drawn_R.clamp_min(0), seconds_R)
            next_R = given_RV.gather(-1, seconds_R.unsqueeze(-1)) - log_norms_R1
            is_known_R = is_greedy_R | is_other_R
            second = (
                torch.where(is_known_R, seconds_R, second[0]),
                torch.where(is_known_R, next_R.squeeze(-1).exp(), second[1]),
            )
        return _drawn((places_R, chances_R), second, drawn_R >= 0, kinds, ids_V)

    def _kind(self, temperature: float) -> int:
        return _LIKELIEST if self._balance.get(round(temperature, 1), 0.0) > _EVIDENCE else _DRAWN

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


def _second(logits_RV: Tensor, places_R: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest but for these, and its logit. Overwrites the logits of these."""
    logits_RV.scatter_(-1, places_R.unsqueeze(-1), -math.inf)
    return likeliest(logits_RV, {})


def _beside(given_RV: Tensor, log_norms_R1: Tensor, places_R: Tensor, draws_R1: Tensor) -> tuple[Tensor, Tensor]:
    """But for the tokens at these places, the one that has most of what lies beside the number; and how much of it."""
    shares_RV = (given_RV - log_norms_R1).exp()
    ends_RV = shares_RV.cumsum(dim=-1)
    inside_RV = torch.minimum(ends_RV, draws_R1 + _NEARBY) - torch.maximum(ends_RV - shares_RV, draws_R1 - _NEARBY)
    most_R, seconds_R = inside_RV.scatter(-1, places_R.unsqueeze(-1), -1.0).max(dim=-1)
    return seconds_R, (most_R / (2 * _NEARBY)).clamp_min(0.0)


def _greedy(logits_RV: Tensor, ids_V: Tensor | None, *, has_second: bool) -> list[Drawn | None]:
    """Between a step and the next, when torch's caches are cold: so little of it is called."""
    places_R2, shares_R2 = likeliest_two(logits_RV)
    found: list[Drawn | None] = []
    for (token, other), shares in zip(_ids(places_R2, ids_V).tolist(), shares_R2.tolist(), strict=True):
        if not math.isfinite(shares[0]):
            found.append(None)
            continue
        first, second = (min(NUM_DEGREES - 1, int(share * NUM_DEGREES)) for share in shares)
        found.append(Drawn(token, first, (other, second) if has_second else None))
    return found


def _drawn(
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor] | None,
    is_drawn_R: Tensor,
    kinds: Seq[int],
    ids_V: Tensor | None,
) -> list[Drawn | None]:
    """first, second: where the tokens are in the logits, and how likely each is."""
    tokens = _with_kinds(*first, kinds, ids_V)
    seconds = [*_with_kinds(*second, kinds, ids_V)] if second else [None] * len(kinds)
    found = zip(tokens, seconds, is_drawn_R.tolist(), strict=True)
    return [Drawn(*token, other) if is_drawn else None for token, other, is_drawn in found]


def _with_kinds(places_R: Tensor, chances_R: Tensor, kinds: Seq[int], ids_V: Tensor | None) -> list[tuple[int, int]]:
    degrees_R = (chances_R * NUM_DEGREES).nan_to_num().clamp(0, NUM_DEGREES - 1).long()
    pairs = zip(_ids(places_R, ids_V).tolist(), degrees_R.tolist(), kinds, strict=True)
    return [(token, NUM_DEGREES * kind + degree) for token, degree, kind in pairs]


def _ids(places_R: Tensor, ids_V: Tensor | None) -> Tensor:
    return places_R if ids_V is None else ids_V[places_R]
