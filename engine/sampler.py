"""Choosing the next token of each row of a step.

The choice is a function of the row's logits, tokens, seed and position only: never of the batch, the device or the
replica, so that a sequence that moves goes on as if it had stayed.

    logits -> min_tokens, penalties, mask -> temperature -> top-k -> top-p -> min-p -> draw      (transformers' order)

A filter keeps every token whose logit reaches a threshold, so that equal tokens stay or go together. The draw is the
inverse of the cumulative distribution, in the order of token ids, at a number in [0, 1) that is hashed from (seed,
position).
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence as Seq
from hashlib import blake2b

import torch
from torch import Tensor

from cluster.words.request import TokenLogprob
from engine.sampling import Chosen, SamplingRow

# P positions, R rows, N those of them that draw at random, V vocabulary

_FEW = 1024  # a nucleus usually lies within so many tokens, which are found much sooner than all are sorted
_DRAW_BITS = 48  # a draw times a sum of probabilities stays below the sum, also after rounding to fp64


@torch.inference_mode()
def sample(logits_PV: Tensor, rows: Seq[SamplingRow], positions: Seq[int] | None = None) -> list[Chosen | None]:
    """Choose a token for each row; None for one whose logits are not finite, whatever stands beside it.

    logits_PV: fp32, left as it is; positions: which of them is each row's, None where there is one for each, in order.
    Log-probabilities are those of the logits as given, before anything here changes them.
    """
    logits_RV = logits_PV if positions is None else logits_PV[_place(positions, torch.int64, logits_PV.device)]
    adjusted_RV = _adjust(logits_RV, rows)
    best_R, chosen_R = adjusted_RV.max(dim=-1)  # the best is not finite where there is a NaN, an infinity, or no choice
    drawing = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    if drawing:
        drawing_N = _place(drawing, torch.int64, chosen_R.device)
        chosen_R[drawing_N] = _draw(adjusted_RV[drawing_N], [rows[i] for i in drawing])
    logprobs = _logprobs(logits_RV, chosen_R, rows)
    ids = ((chosen_R + 1) * best_R.isfinite() - 1).tolist()  # -1 where it is not; one wait for the device
    return [(token_id, logprob) if token_id >= 0 else None for token_id, logprob in zip(ids, logprobs, strict=True)]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) by which the token at `position` is drawn: a hash, the same on every machine."""
    digest = blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8, person=b"token-draw").digest()
    return (int.from_bytes(digest, "little") >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def _adjust(logits_RV: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """Forbid stop tokens that come too early and what is not allowed, and apply the penalties.

    A new tensor if anything changes.
    """
    adjusted_RV = logits_RV
    for i, row in enumerate(rows):
        s = row.sampling
        is_early = len(row.tokens) - row.num_prompt_tokens < s.min_tokens and s.stop_token_ids
        has_output_penalty = bool(s.presence_penalty or s.frequency_penalty)
        if not (is_early or s.repetition_penalty != 1.0 or has_output_penalty or row.allowed is not None):
            continue
        if adjusted_RV is logits_RV:
            adjusted_RV = logits_RV.clone()
        logits_V = adjusted_RV[i]
        if s.repetition_penalty != 1.0:
            seen = _place(sorted(set(row.tokens)), torch.int64, logits_V.device)
            values = logits_V[seen]
            logits_V[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        if has_output_penalty and row.output:
            counts_of = Counter(row.output)
            seen = _place(list(counts_of), torch.int64, logits_V.device)
            counts = _place(list(counts_of.values()), torch.int64, logits_V.device)
            logits_V[seen] -= s.presence_penalty + s.frequency_penalty * counts
        if is_early:
            known = [token for token in s.stop_token_ids if 0 <= token < len(logits_V)]  # a model may name others
            logits_V.index_fill_(0, _place(known, torch.int64, logits_V.device), -math.inf)
        if row.allowed is not None:
            allowed = _place(row.allowed, torch.int64, logits_V.device)
            kept = logits_V[allowed]
            logits_V.fill_(-math.inf)[allowed] = kept
    return adjusted_RV


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


def _logprobs(logits_RV: Tensor, chosen_R: Tensor, rows: Seq[SamplingRow]) -> list[TokenLogprob | None]:
    wanted = [i for i, row in enumerate(rows) if row.sampling.num_logprobs is not None]
    found: list[TokenLogprob | None] = [None] * len(rows)
    if not wanted:
        return found
    wanted_N = _place(wanted, torch.int64, logits_RV.device)
    logits_NV = logits_RV[wanted_N]
    norms_N1 = _logsumexp(logits_NV)
    chosen = (logits_NV.gather(-1, chosen_R[wanted_N].unsqueeze(-1)) - norms_N1).squeeze(-1).tolist()
    most = max(rows[i].sampling.num_logprobs or 0 for i in wanted)
    top_NK = logits_NV.topk(min(most, logits_NV.shape[-1]), dim=-1)
    ids, values = top_NK.indices.tolist(), (top_NK.values - norms_N1).tolist()
    for n, i in enumerate(wanted):
        count = rows[i].sampling.num_logprobs or 0
        top = tuple(zip(ids[n][:count], values[n][:count], strict=True))
        found[i] = TokenLogprob(logprob=chosen[n], top=top)
    return found


def _place(values: Seq[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the device; nothing waits for the copy but what comes behind it there."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _logsumexp(logits_NV: Tensor) -> Tensor:
    most_N1 = logits_NV.amax(dim=-1, keepdim=True)
    return most_N1 + _sum((logits_NV - most_N1).exp()).log().float()


def _sum(x_NV: Tensor) -> Tensor:
    """-> (N, 1) fp64. Torch's own sum shares one row out among threads, but not a row among others: other bits."""
    return x_NV.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
