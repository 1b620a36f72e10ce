"""Sampling of draft tokens from a draft model's logits.

A draft token is sampled with the random number that the sequence's own token at that position will use. If both
distributions are equal, all tokens agree. If they differ, tokens agree as often as the two cumulative distributions
give the same token for a random number. The likeliest token of a weak draft model agrees more often than that. Which of
the two to propose is learned per temperature.
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
from engine.sampling.greedy import num_threads
from engine.sampling.params import SamplingRow
from engine.sampling.sampler import sample, uniform
from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import NO_PROPOSAL, Proposal

# R rows, V vocabulary

GREEDY, DRAWN, LIKELIEST = range(3)  # greedy row; sampled row that proposes the sampled token; or the likeliest
NUM_DEGREES = 16  # of confidence
_KEEP = 0.98  # weight of the past at each observation
_EVIDENCE = 4.0  # right guesses by which the likeliest token must lead the sampled one


class DraftToken(NamedTuple):
    """Draft token with its kind (see Proposal), which encodes the model's confidence."""

    token: int
    kind: int


@dataclass(eq=False, slots=True)
class RowDraft:
    """Draft of one row, built place by place."""

    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    is_over: bool = False

    def take(self, token: DraftToken | None) -> int:
        """Append the token; None ends the draft. Returns its id; for None, an arbitrary id."""
        self.is_over |= token is None
        if token is None or self.is_over:
            return 0
        self.tokens.append(token.token)
        self.kinds.append(token.kind)
        return token.token

    def proposal(self) -> Proposal:
        return Proposal(self.tokens, self.kinds) if self.tokens else NO_PROPOSAL


class DraftSampler:
    """Samples draft tokens of sequences. Owned by the step thread.

    Applies temperature, top-k, top-p and min-p of a request. Penalties, rules and grammars apply when the draft is
    verified.
    """

    def __init__(self, *, learns: bool = True) -> None:
        """learns: False to propose the sampled token always."""
        self._rows: WeakKeyDictionary[Sequence, SamplingRow] = WeakKeyDictionary()
        self._learns = learns
        self._balance: dict[float, float] = {}  # by temperature in tenths; above 0: likeliest more often right
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
        drawn, shares = draws.tokens_R3[:, 1].tolist(), draws.shares_R.tolist()
        tokens = (draws.tokens_R3 if ids_V is None else ids_V[draws.tokens_R3.clamp_min(0)]).tolist()
        if place == 0 and self._learns and any(kinds):
            self._learn(sequences, [row[1] for row in tokens], [row[0] for row in tokens])
        return [
            DraftToken(token, NUM_DEGREES * kind + _degree(share)) if is_drawn >= 0 else None
            for kind, is_drawn, (_, _, token), share in zip(kinds, drawn, tokens, shares, strict=True)
        ]

    def _kind(self, temperature: float) -> int:
        return LIKELIEST if self._balance.get(round(temperature, 1), 0.0) > _EVIDENCE else DRAWN

    def _learn(self, sequences: Seq[Sequence], drawn: Seq[int], likeliest: Seq[int]) -> None:
        """Learn whether the sampled or the likeliest first token of each sequence's last draft was right."""
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

    tokens_R3: Tensor  # likeliest, sampled, and proposed token
    shares_R: Tensor  # fp32: probability of the proposed token


def draw_drafts(logits_RV: Tensor, rows: Seq[SamplingRow], kinds: Seq[int]) -> Draws:
    """Sample a draft token of each row.

    logits_RV: fp32, may be overwritten. kinds: GREEDY, DRAWN or LIKELIEST of each row. The
    sampled token is below 0 where the logits are not finite. Kernel and torch agree but for rounding.
    """
    kernels = open_copies(logits_RV.device)
    if kernels is not None and logits_RV.is_contiguous():
        return _by_kernel(kernels, logits_RV, rows, kinds)
    return _by_torch(logits_RV, rows, kinds) if any(kinds) else _likeliest(logits_RV)


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
    tokens_R3, shares_R = torch.empty(num_rows, 3, dtype=torch.int64), torch.empty(num_rows)
    is_filtered = any(map(_is_filtered, rows))
    if is_filtered:
        tokens_R3[:, 1] = torch.as_tensor(sample(logits_RV, rows).token_ids)
    kernels.draw_drafts(
        byref(
            DraftDraws(
                logits=logits_RV.data_ptr(),
                rows=num_rows,
                vocabulary=vocabulary,
                kinds=kinds_R.ctypes.data,
                temperatures=temperatures_R.ctypes.data,
                numbers=numbers_R.ctypes.data,
                is_drawn=is_filtered,
                tokens=tokens_R3.data_ptr(),
                shares=shares_R.data_ptr(),
                threads=num_threads(logits_RV),
            )
        )
    )
    return Draws(tokens_R3, shares_R)


def _likeliest(logits_RV: Tensor) -> Draws:
    """Handle a batch of greedy rows."""
    most_R, ids_R = logits_RV.max(dim=-1)
    shares_R = (most_R - logits_RV.logsumexp(-1)).exp()
    drawn_R = torch.where(shares_R.isfinite(), ids_R, -1)
    return Draws(torch.stack((ids_R, drawn_R, ids_R), dim=-1), shares_R)


def _by_torch(logits_RV: Tensor, rows: Seq[SamplingRow], kinds: Seq[int]) -> Draws:
    device = logits_RV.device
    given_RV = logits_RV / torch.tensor([*map(_temperature, rows)], device=device).unsqueeze(-1)
    kinds_R = torch.tensor(kinds, device=device)
    drawn_R = torch.as_tensor(sample(logits_RV, rows).token_ids, device=device).long()
    most_R = given_RV.argmax(dim=-1)
    drafted_R = torch.where(kinds_R == LIKELIEST, most_R, drawn_R.clamp_min(0))
    shares_R = (given_RV.gather(-1, drafted_R.unsqueeze(-1)).squeeze(-1) - given_RV.logsumexp(dim=-1)).exp()
    return Draws(torch.stack((most_R, drawn_R, drafted_R), dim=-1), shares_R)
