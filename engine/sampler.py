"""Choosing the next token of each row of a step.

The choice is a function of the row's logits, tokens, seed and position only: never of the batch, the device or the
replica, so that a sequence that moves goes on as if it had stayed.

    logits -> min_tokens, mask, allowed tokens, bad words, bias                     (vLLM's order, as far as it matters)
           -> penalties -> temperature -> top-k -> top-p -> min-p -> draw           (transformers' order)

A filter keeps every token whose logit reaches a threshold, so that equal tokens stay or go together. The draw is the
inverse of the cumulative distribution, in the order of token ids, at a number in [0, 1) that is hashed from (seed,
position).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence as Seq
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.words.request import TokenLogprob
from engine.likeliest import likeliest
from engine.ruled_tokens import RuledTokens
from engine.sampling import Chosen, SamplingRow

# P positions, R rows, N those of them that draw at random, V vocabulary, U tokens that a row says something of

_NumberedRow = tuple[int, SamplingRow]

_FEW = 1024  # a nucleus usually lies within so many tokens, which are found much sooner than all are sorted
_DRAW_BITS = 48  # a draw times a sum of probabilities stays below the sum, also after rounding to fp64


@torch.inference_mode()
def sample(logits_PV: Tensor, rows: Seq[SamplingRow], positions: Seq[int] | None = None) -> list[Chosen | None]:
    """Choose a token for each row; None for one whose logits are not finite, whatever stands beside it.

    logits_PV: fp32, which may be overwritten; positions: which of them is each row's, None where there is one for each,
    in order. Log-probabilities are those of the logits as given, before anything here changes them.
    """
    logits_RV = logits_PV if positions is None else logits_PV[_place(positions, torch.int64, logits_PV.device)]
    asking = [(i, row) for i, row in enumerate(rows) if not row.is_plain]
    telling = [(i, row) for i, row in asking if row.sampling.num_logprobs is not None]
    drawing = [(i, row) for i, row in asking if not row.sampling.is_greedy]
    told_NV = logits_RV[_numbers(telling, logits_RV.device)] if telling else None
    _forbid(logits_RV, asking)
    _apply_rules(logits_RV, [(i, row, row.ruled) for i, row in asking if row.ruled is not None])
    chosen_R = likeliest(logits_RV, {i: row.penalties() for i, row in asking if row.sampling.has_penalties})
    best_R = logits_RV.gather(-1, chosen_R.unsqueeze(-1)).squeeze(-1)
    if drawing:
        drawing_N = _numbers(drawing, chosen_R.device)
        chosen_R[drawing_N] = _draw(logits_RV[drawing_N], [row for _, row in drawing])
    logprobs: dict[int, TokenLogprob] = {}
    if told_NV is not None:
        chosen_N = chosen_R[_numbers(telling, chosen_R.device)]
        found = _logprobs(told_NV, chosen_N, [row for _, row in telling])
        logprobs = {i: logprob for (i, _), logprob in zip(telling, found, strict=True)}
    ids = ((chosen_R + 1) * best_R.isfinite() - 1).tolist()  # -1 where it is not; one wait for the device
    if -1 in ids:
        for i, row in asking:  # a NaN is the model's
            row.is_contradicted = ids[i] < 0 and row.ruled is not None and bool(best_R[i] == -math.inf)
    return [(token_id, logprobs.get(i)) if token_id >= 0 else None for i, token_id in enumerate(ids)]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) by which the token at `position` is drawn: a hash, the same on every machine."""
    digest = blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8, person=b"token-draw").digest()
    return (int.from_bytes(digest, "little") >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def _forbid(logits_RV: Tensor, rows: Seq[_NumberedRow]) -> None:
    """Stop tokens that come too early, and what is not allowed. In place."""
    vocabulary, device = logits_RV.shape[-1], logits_RV.device
    if early := [(i, row.early_stops()) for i, row in rows if row.is_early]:
        early_2U = _pairs(early)
        _set_impossible(logits_RV, early_2U[:, (early_2U[1] >= 0) & (early_2U[1] < vocabulary)])
    if masked := [(i, row) for i, row in rows if row.mask is not None]:
        words = [row.mask.allowed(row.tokens, row.num_prompt_tokens) for _, row in masked if row.mask is not None]
        words_NW1 = _place(np.stack(words), torch.int32, device).unsqueeze(-1)
        is_allowed_NV = (words_NW1 >> torch.arange(32, device=device) & 1).flatten(1)[:, :vocabulary].bool()
        masked_N = _numbers(masked, device)
        logits_RV[masked_N] = logits_RV[masked_N].masked_fill(~is_allowed_NV, -math.inf)


def _apply_rules(logits_RV: Tensor, rows: Seq[tuple[int, SamplingRow, RuledTokens]]) -> None:
    """What they say of single tokens. In place."""
    device = logits_RV.device
    if allowed := [(i, ruled.allowed) for i, _, ruled in rows if len(ruled.allowed)]:
        rows_U, ids_U = _place(_pairs(allowed), torch.int64, device)
        kept_U = logits_RV[rows_U, ids_U]
        logits_RV.index_fill_(0, _place([i for i, _ in allowed], torch.int64, device), -math.inf)
        logits_RV[rows_U, ids_U] = kept_U
    if forbidden := [(i, tokens) for i, row, ruled in rows if (tokens := row.forbidden(ruled))]:
        _set_impossible(logits_RV, _pairs(forbidden))
    if biased := [(i, ruled) for i, _, ruled in rows if len(ruled.biased)]:
        rows_U, ids_U = _place(_pairs([(i, ruled.biased) for i, ruled in biased]), torch.int64, device)
        biases_U = np.concatenate([ruled.biases for _, ruled in biased])
        logits_RV[rows_U, ids_U] = logits_RV[rows_U, ids_U] + _place(biases_U, torch.float32, device)


def _pairs(rows: Seq[tuple[int, Seq[int] | NDArray[np.int64]]]) -> NDArray[np.int64]:
    """(2, U): the row and the token of each."""
    rows_U = np.repeat([i for i, _ in rows], [len(tokens) for _, tokens in rows])
    return np.stack((rows_U, np.concatenate([tokens for _, tokens in rows])))


def _set_impossible(logits_RV: Tensor, pairs_2U: NDArray[np.int64]) -> None:
    device = logits_RV.device
    rows_U, ids_U = _place(pairs_2U, torch.int64, device)
    logits_RV[rows_U, ids_U] = torch.full((), -math.inf, device=device)


def _draw(logits_NV: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """-> (N,) int64."""
    device = logits_NV.device

    def column(values: list[float]) -> Tensor:
        return _place(values, torch.float32, device).unsqueeze(-1)

    # The greatest logit becomes 0, so that the smallest temperature overflows to -inf at worst.
    scaled_NV = logits_NV - logits_NV.amax(dim=-1, keepdim=True)
    scaled_NV /= column([row.sampling.temperature for row in rows])
    scaled_NV = _keep_top_k(scaled_NV, [row.sampling.top_k for row in rows])
    scaled_NV = _keep_top_p(scaled_NV, [row.sampling.top_p for row in rows])
    if any(row.sampling.min_p > 0 for row in rows):
        threshold_N1 = column([math.log(row.sampling.min_p) if row.sampling.min_p > 0 else -math.inf for row in rows])
        scaled_NV = scaled_NV.masked_fill(scaled_NV < threshold_N1, -math.inf)
    # In fp64 the running sum does not depend on how a device adds up.
    cumulative_NV = scaled_NV.exp().cumsum(dim=-1, dtype=torch.float64)
    draws_N = _place([uniform(row.seed, len(row.tokens)) for row in rows], torch.float64, device)
    targets_N1 = draws_N.unsqueeze(-1) * cumulative_NV[:, -1:]
    # Where logits are not finite nothing is found. That row fails, but its id is looked up beside the others' before.
    most = scaled_NV.shape[-1] - 1
    return torch.searchsorted(cumulative_NV, targets_N1, right=True).clamp_max(most).squeeze(-1)


def _keep_top_k(scaled_NV: Tensor, top_k: Seq[int]) -> Tensor:
    """Keep the k greatest of each row, and those equal to the k-th."""
    limits = [k if 0 < k < scaled_NV.shape[-1] else 0 for k in top_k]
    if not any(limits):
        return scaled_NV
    greatest_NK = scaled_NV.topk(max(limits), dim=-1).values
    index_N1 = _place([max(0, k - 1) for k in limits], torch.int64, scaled_NV.device).unsqueeze(-1)
    is_off_N1 = _place([k == 0 for k in limits], torch.bool, scaled_NV.device).unsqueeze(-1)
    threshold_N1 = greatest_NK.gather(-1, index_N1).masked_fill(is_off_N1, -math.inf)
    return scaled_NV.masked_fill(scaled_NV < threshold_N1, -math.inf)


def _keep_top_p(scaled_NV: Tensor, top_p: Seq[float]) -> Tensor:
    """Keep the likeliest tokens whose probabilities reach p together, and those equal to the last of them."""
    rows = [i for i, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return scaled_NV
    wanted_N1 = _place([top_p[i] for i in rows], torch.float64, scaled_NV.device).unsqueeze(-1)
    rows_N = _place(rows, torch.int64, scaled_NV.device)
    chosen_NV = scaled_NV[rows_N]
    mass_N1 = _sum(chosen_NV.exp()) * wanted_N1
    for num_greatest in (min(_FEW, chosen_NV.shape[-1]), chosen_NV.shape[-1]):
        greatest_NK = chosen_NV.topk(num_greatest, dim=-1).values
        reached_NK = greatest_NK.exp().cumsum(dim=-1, dtype=torch.float64)
        if bool((reached_NK[:, -1:] >= mass_N1).all()):
            break
    # The first token at which the sum reaches the mass is the last one kept.
    last_N1 = (reached_NK < mass_N1).sum(dim=-1, keepdim=True).clamp_max(greatest_NK.shape[-1] - 1)
    kept_NV = chosen_NV.masked_fill(chosen_NV < greatest_NK.gather(-1, last_N1), -math.inf)
    scaled_NV = scaled_NV.clone()
    scaled_NV[rows_N] = kept_NV
    return scaled_NV


def _logprobs(logits_NV: Tensor, chosen_N: Tensor, rows: Seq[SamplingRow]) -> list[TokenLogprob]:
    """Of rows that all want them."""
    norms_N1 = _logsumexp(logits_NV)
    chosen = (logits_NV.gather(-1, chosen_N.unsqueeze(-1)) - norms_N1).squeeze(-1).tolist()
    counts = [row.sampling.num_logprobs or 0 for row in rows]
    top_NK = logits_NV.topk(min(max(counts), logits_NV.shape[-1]), dim=-1)
    ids, values = top_NK.indices.tolist(), (top_NK.values - norms_N1).tolist()
    return [
        TokenLogprob(logprob=chosen[n], top=tuple(zip(ids[n][:count], values[n][:count], strict=True)))
        for n, count in enumerate(counts)
    ]


def _numbers(rows: Seq[_NumberedRow], device: torch.device) -> Tensor:
    return _place([i for i, _ in rows], torch.int64, device)


def _place(
    values: Seq[float] | NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """On the device; nothing waits for the copy but what comes behind it there."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _logsumexp(logits_NV: Tensor) -> Tensor:
    most_N1 = logits_NV.amax(dim=-1, keepdim=True)
    return most_N1 + _sum((logits_NV - most_N1).exp()).log().float()


def _sum(x_NV: Tensor) -> Tensor:
    """-> (N, 1) fp64. Torch's own sum shares one row out among threads, but not a row among others: other bits."""
    return x_NV.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
