"""From a draft's logits the tokens that are drafted, and those that may be there instead: see draft_models/drawn.py."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from ctypes import byref
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cpu.library import Kernels, open_copies
from engine.cpu.structs import DraftDraws
from engine.sampling.greedy import likeliest, num_threads
from engine.sampling.params import SamplingRow
from engine.sampling.sampler import sample, uniform

# R rows, V vocabulary

GREEDY, DRAWN, LIKELIEST = range(3)  # kinds of tokens: of who draws none; of who does, drawn, and not
_NEARBY = 0.05  # of the number: so far the target's distribution may be moved


class Draws(NamedTuple):
    """Tokens are places in the logits."""

    tokens_R4: Tensor  # the likeliest; the one drawn by the row's number; of these the one drafted; and one instead
    shares_R2: Tensor  # fp32: of the distribution, the drafted one's and the other's


def draw_drafts(logits_RV: Tensor, rows: Seq[SamplingRow], kinds: Seq[int]) -> Draws:
    """logits_RV: fp32, two or more of each row; may be overwritten. rows: who draws, and where. kinds: of each. Where
    the logits of a row are not finite, its drawn one is below 0.

    Instead of the likeliest, the one that was drawn; of who draws nothing, the second; of one that was drawn, the one
    that has most of what lies beside the number. With our kernel and without it the same, but for rounding.
    """
    kernels = open_copies(logits_RV.device)
    if kernels is not None and logits_RV.is_contiguous():
        return _by_kernel(kernels, logits_RV, rows, kinds)
    return _by_torch(logits_RV, rows, kinds) if any(kinds) else _two_likeliest(logits_RV)


def _is_filtered(row: SamplingRow) -> bool:
    asked = row.sampling
    return not asked.is_greedy and (asked.top_k > 0 or asked.top_p < 1 or asked.min_p > 0)


def _temperature(row: SamplingRow) -> float:
    return 1.0 if row.sampling.is_greedy else row.sampling.temperature


def _number(row: SamplingRow) -> float:
    return 0.0 if row.sampling.is_greedy else uniform(row.seed, row.position)


def _by_kernel(kernels: Kernels, logits_RV: Tensor, rows: Seq[SamplingRow], kinds: Seq[int]) -> Draws:
    """Between a step and the next, when torch's caches are cold: so little of it is called."""
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
    """Where nobody draws."""
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
    beside_R, beside_shares_R = _beside(given_RV, log_norms_R1, drafted_R, numbers_R1)
    is_other_R = (kinds_R == LIKELIEST) & (drawn_R >= 0) & (drawn_R != most_R)
    instead_R = torch.where(is_other_R, drawn_R.clamp_min(0), _second(given_RV.clone(), drafted_R))
    is_known_R = is_other_R | (kinds_R == GREEDY)
    shares_R2 = shares(drafted_R), torch.where(is_known_R, shares(instead_R), beside_shares_R)
    tokens_R4 = most_R, drawn_R, drafted_R, torch.where(is_known_R, instead_R, beside_R)
    return Draws(torch.stack(tokens_R4, dim=-1), torch.stack(shares_R2, dim=-1))


def _second(logits_RV: Tensor, places_R: Tensor) -> Tensor:
    """The likeliest but for these. Overwrites the logits of these."""
    logits_RV.scatter_(-1, places_R.unsqueeze(-1), -math.inf)
    return likeliest(logits_RV, {})[0]


def _beside(given_RV: Tensor, log_norms_R1: Tensor, places_R: Tensor, numbers_R1: Tensor) -> tuple[Tensor, Tensor]:
    """But for the tokens at these places, the one that has most of what lies beside the number; and how much of it."""
    shares_RV = (given_RV - log_norms_R1).exp()
    ends_RV = shares_RV.cumsum(dim=-1)
    inside_RV = torch.minimum(ends_RV, numbers_R1 + _NEARBY) - torch.maximum(ends_RV - shares_RV, numbers_R1 - _NEARBY)
    most_R, seconds_R = inside_RV.scatter(-1, places_R.unsqueeze(-1), -1.0).max(dim=-1)
    return seconds_R, (most_R / (2 * _NEARBY)).clamp_min(0.0)
