"""Sampling of draft tokens from a draft model's logits.

A draft token is sampled with the random number that the sequence's own token at that position will use. If both
distributions are equal, so is every token. If they differ, tokens agree as often as the two cumulative distributions
give the same token for a random number. A weak draft's likeliest token agrees more often than that; which of the two to
propose is learned by temperature.

The second token, which may begin a branch, is not simply the second likeliest. For a sampled token it is the neighbour
of the random number, because the target's cumulative distribution is the draft's, shifted a little. For the likeliest
token of a row that samples it is the sampled token; for a greedy row, the second likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from ctypes import byref
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine.cpu.library import Kernels, open_copies
from engine.cpu.structs import DraftDraws
from engine.sampling.greedy import likeliest, num_threads
from engine.sampling.params import SamplingRow
from engine.sampling.sampler import sample, uniform
from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import NO_PROPOSAL, Proposal, ProposedBranch

# R rows, V vocabulary

GREEDY, DRAWN, LIKELIEST = range(3)  # greedy row; sampled row's sampled token; sampled row's likeliest token
NUM_DEGREES = 16  # of confidence
_KEEP = 0.98  # weight of the past at each time that sampled and likeliest token differ and one of them is right
_EVIDENCE = 4.0  # times that the likeliest was right more often than the sampled one
_BRANCHING = 2  # places with a second token; deeper ones would pay still less
_NEARBY = 0.05  # of the random number; the target's distribution may be moved so far


class DraftToken(NamedTuple):
    """A token and its kind (see Proposal): the confidence of the model."""

    token: int
    kind: int
    second: tuple[int, int] | None = None  # token and kind of an alternative


@dataclass(eq=False, slots=True)
class RowDraft:
    """Draft of one row, built place by place."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    is_over: bool = False
    _seconds: list[tuple[int, int, int]] = field(default_factory=list)  # place, token, kind

    def take(self, token: DraftToken | None) -> int:
        """Append the token; None ends the draft. Returns the id, or any id if there is none."""
        self.is_over |= token is None
        if token is None or self.is_over:
            return 0
        if token.second:
            self._seconds.append((len(self.tokens), *token.second))
        self.tokens.append(token.token)
        self.kinds.append(token.kind)
        return token.token

    def proposal(self, *, by_place: bool = False) -> Proposal:
        """by_place: the token at a place does not depend on those before it."""
        if not self.tokens:
            return NO_PROPOSAL
        branches = [
            ProposedBranch(
                place,
                [token, *(self.tokens[place + 1 :] if by_place else ())],
                [kind, *(self.kinds[place + 1 :] if by_place else ())],
            )
            for place, token, kind in self._seconds
        ]
        return Proposal(self.tokens, self.kinds, branches)


class DraftSampler:
    """Samples draft tokens of sequences. Owned by the step thread.

    Applies temperature, top-k, top-p and min-p of a request. Penalties, rules and grammars apply when the draft is
    verified.
    """

    def __init__(self, *, learns: bool = True) -> None:
        """learns: False to propose the sampled token always."""
        self._rows: WeakKeyDictionary[Sequence, SamplingRow] = WeakKeyDictionary()
        self._learns = learns
        self._balance: dict[float, float] = {}  # by temperature, in tenths: above 0 where the likeliest is right
        self._last: WeakKeyDictionary[Sequence, tuple[int, int, int]] = WeakKeyDictionary()

    @torch.inference_mode()
    def draw(
        self, logits_RV: Tensor, sequences: Seq[Sequence], place: int, *, ids_V: Tensor | None = None
    ) -> list[DraftToken | None]:
        """Return for each sequence the token at this place of its draft; None if the logits are not finite.

        Waits for the device. logits_RV: fp32, may be overwritten. ids_V: token ids of the logits, ascending, on the
        same device; None for the whole vocabulary.
        """
        rows = [self._row(sequence).behind(place) for sequence in sequences]
        kinds = [GREEDY if row.sampling.is_greedy else self._kind(row.sampling.temperature) for row in rows]
        draws = draw_drafts(logits_RV, rows, kinds)
        drawn, shares = draws.tokens_R4[:, 1].tolist(), draws.shares_R2.tolist()
        tokens = (draws.tokens_R4 if ids_V is None else ids_V[draws.tokens_R4.clamp_min(0)]).tolist()
        if place == 0 and self._learns and any(kinds):
            self._learn(sequences, [row[1] for row in tokens], [row[0] for row in tokens])
        found: list[DraftToken | None] = []
        for kind, is_drawn, (_, _, token, other), both in zip(kinds, drawn, tokens, shares, strict=True):
            first, second = (NUM_DEGREES * kind + _degree(share) for share in both)
            beside = (other, second) if place < _BRANCHING else None
            found.append(DraftToken(token, first, beside) if is_drawn >= 0 else None)
        return found

    def _kind(self, temperature: float) -> int:
        return LIKELIEST if self._balance.get(round(temperature, 1), 0.0) > _EVIDENCE else DRAWN

    def _learn(self, sequences: Seq[Sequence], drawn: Seq[int], likeliest: Seq[int]) -> None:
        """Learn from the outcome of the last draft of each sequence: which of both first tokens was right."""
        for sequence, *both in zip(sequences, drawn, likeliest, strict=True):
            if sequence.sampling_row.sampling.is_greedy:
                continue
            position, *before = self._last.get(sequence, (len(sequence.tokens), -1, -1))
            self._last[sequence] = len(sequence.tokens), both[0], both[1]
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


class Draws(NamedTuple):
    """Token indices into the logits."""

    tokens_R4: Tensor  # likeliest; sampled; the proposed one of both; alternative
    shares_R2: Tensor  # fp32: probabilities of the proposed token and of the alternative


def draw_drafts(logits_RV: Tensor, rows: Seq[SamplingRow], kinds: Seq[int]) -> Draws:
    """Sample a draft token of each row, and an alternative.

    logits_RV: fp32, at least two columns; may be overwritten. kinds: GREEDY, DRAWN or LIKELIEST of each row. The
    sampled token is below 0 where the logits are not finite. Kernel and torch agree but for rounding.
    """
    kernels = open_copies(logits_RV.device)
    if kernels is not None and logits_RV.is_contiguous():
        return _by_kernel(kernels, logits_RV, rows, kinds)
    return _by_torch(logits_RV, rows, kinds) if any(kinds) else _two_likeliest(logits_RV)


def _is_filtered(row: SamplingRow) -> bool:
    sampling = row.sampling
    return not sampling.is_greedy and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def _temperature(row: SamplingRow) -> float:
    return 1.0 if row.sampling.is_greedy else row.sampling.temperature


def _number(row: SamplingRow) -> float:
    return 0.0 if row.sampling.is_greedy else uniform(row.seed, row.position)


def _by_kernel(kernels: Kernels, logits_RV: Tensor, rows: Seq[SamplingRow], kinds: Seq[int]) -> Draws:
    """Call the kernel once: between two steps, with cold caches, every torch call is slow."""
    num_rows, vocabulary = logits_RV.shape
    kinds_R, numbers_R = np.array(kinds, dtype=np.int32), np.array([*map(_number, rows)])
    temperatures_R = np.array([*map(_temperature, rows)], dtype=np.float32)
    tokens_R4, shares_R2 = torch.empty(num_rows, 4, dtype=torch.int64), torch.empty(num_rows, 2)
    is_filtered = any(map(_is_filtered, rows))
    if is_filtered:
        tokens_R4[:, 1] = torch.as_tensor(sample(logits_RV, rows).token_ids)
    kernels.draw_drafts(
        byref(
            DraftDraws(
                logits=logits_RV.data_ptr(),
                rows=num_rows,
                vocabulary=vocabulary,
                kinds=kinds_R.ctypes.data,
                temperatures=temperatures_R.ctypes.data,
                numbers=numbers_R.ctypes.data,
                nearby=_NEARBY,
                is_drawn=is_filtered,
                tokens=tokens_R4.data_ptr(),
                shares=shares_R2.data_ptr(),
                threads=num_threads(logits_RV),
            )
        )
    )
    return Draws(tokens_R4, shares_R2)


def _two_likeliest(logits_RV: Tensor) -> Draws:
    """Handle a batch of greedy rows."""
    most_R2, ids_R2 = logits_RV.topk(2)
    shares_R2 = (most_R2 - logits_RV.logsumexp(-1, keepdim=True)).exp()
    drawn_R = torch.where(shares_R2[:, 0].isfinite(), ids_R2[:, 0], -1)
    return Draws(torch.stack((ids_R2[:, 0], drawn_R, ids_R2[:, 0], ids_R2[:, 1]), dim=-1), shares_R2)


def _by_torch(logits_RV: Tensor, rows: Seq[SamplingRow], kinds: Seq[int]) -> Draws:
    device = logits_RV.device
    given_RV = logits_RV / torch.tensor([*map(_temperature, rows)], device=device).unsqueeze(-1)
    kinds_R = torch.tensor(kinds, device=device)
    drawn_R = torch.as_tensor(sample(logits_RV, rows).token_ids, device=device).long()
    log_norms_R1 = given_RV.logsumexp(dim=-1, keepdim=True)
    most_R = given_RV.argmax(dim=-1)
    drafted_R = torch.where(kinds_R == LIKELIEST, most_R, drawn_R.clamp_min(0))

    def shares(places_R: Tensor) -> Tensor:
        return (given_RV.gather(-1, places_R.unsqueeze(-1)) - log_norms_R1).exp().squeeze(-1)

    numbers_R1 = torch.tensor([[_number(row)] for row in rows], device=device)
    neighbour_R, neighbour_shares_R = _neighbour(given_RV, log_norms_R1, drafted_R, numbers_R1)
    is_other_R = (kinds_R == LIKELIEST) & (drawn_R >= 0) & (drawn_R != most_R)
    instead_R = torch.where(is_other_R, drawn_R.clamp_min(0), _second(given_RV.clone(), drafted_R))
    is_known_R = is_other_R | (kinds_R == GREEDY)
    shares_R2 = shares(drafted_R), torch.where(is_known_R, shares(instead_R), neighbour_shares_R)
    tokens_R4 = most_R, drawn_R, drafted_R, torch.where(is_known_R, instead_R, neighbour_R)
    return Draws(torch.stack(tokens_R4, dim=-1), torch.stack(shares_R2, dim=-1))


def _second(logits_RV: Tensor, places_R: Tensor) -> Tensor:
    """Return the likeliest tokens other than these, whose logits are overwritten."""
    logits_RV.scatter_(-1, places_R.unsqueeze(-1), -math.inf)
    return likeliest(logits_RV, {})[0]


def _neighbour(given_RV: Tensor, log_norms_R1: Tensor, places_R: Tensor, numbers_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the other token with the largest share of the interval around the number, and that share."""
    shares_RV = (given_RV - log_norms_R1).exp()
    ends_RV = shares_RV.cumsum(dim=-1)
    inside_RV = torch.minimum(ends_RV, numbers_R1 + _NEARBY) - torch.maximum(ends_RV - shares_RV, numbers_R1 - _NEARBY)
    most_R, seconds_R = inside_RV.scatter(-1, places_R.unsqueeze(-1), -1.0).max(dim=-1)
    return seconds_R, (most_R / (2 * _NEARBY)).clamp_min(0.0)
