"""Sampler: chooses the next token of each row of a step.

The choice is a function of the row's logits, tokens, seed and position only, never of the batch, the device or the
replica, so a sequence that moves continues as if it had stayed.

    logits -> min_tokens, mask, allowed tokens, bad words, bias                     (vLLM's order, as far as it matters)
           -> penalties -> temperature -> top-k -> top-p -> min-p -> draw           (transformers' order)

A filter keeps every token whose logit reaches a threshold, so equal tokens stay or go together. The draw inverts the
cumulative distribution, in the order of token ids, at a number in [0, 1) hashed from (seed, position).

A CPU sums in fp64 and draws the same on every machine. On a GPU one kernel (engine.kernels.sample) does the last line
and sums in fp32 in its own order: for the same bits of logits, GPUs of one kind draw the same, whatever the batch. A
CPU draws another token only where a sum is within rounding of the draw.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.types.request import TokenLogprob
from engine.batch.device_batch import upload
from engine.kernels.sample import DRAW_BITS, NO_LOGIT_IS_FINITE, NOT_FINITE, NUM_NUMBERS, launch_choice
from engine.runner import streams
from engine.runner.streams import DeviceStream
from engine.sampling.greedy import likeliest, penalise
from engine.sampling.logprobs import logprobs_of, row_sums
from engine.sampling.params import Chosen, Sampled, SamplingRow
from engine.sampling.token_masks import TokenRuleTensors

# P positions, R rows, N rows of a subset, V vocabulary, U (row, token) pairs

_NumberedRow = tuple[int, SamplingRow]

# A nucleus usually lies within this many tokens, and finding them is much cheaper than sorting all.
_FEW = 1024
# The product of a draw and a sum of probabilities stays below the sum, also after rounding to fp64.
_DRAW_BITS = 48


@torch.inference_mode()
def sample(logits_PV: Tensor, rows: Seq[SamplingRow], positions: Seq[int] | None = None) -> Sampled:
    """Choose a token for each row; None for a row with non-finite logits. Never waits for a GPU.

    logits_PV: fp32, may be overwritten; positions: of each row's logits, None for one per row, in order.
    Log-probabilities are those of the logits as given, before any processing.
    """
    logits_RV = logits_PV if positions is None else logits_PV[_place(positions, torch.int64, logits_PV.device)]
    special = [(i, row) for i, row in enumerate(rows) if row.has_options or (row.mask is not None and row.is_masked)]
    with_logprobs = [(i, row) for i, row in special if row.sampling.num_logprobs is not None]
    given_NV = logits_RV[_numbers(with_logprobs, logits_RV.device)] if with_logprobs else None
    if special:
        _forbid(logits_RV, special)
        _apply_rules(logits_RV, [(i, row, row.ruled) for i, row in special if row.ruled is not None])
    ids_R = choose_by_kernel(logits_RV, special) if logits_RV.is_cuda else choose_by_torch(logits_RV, special)
    found: tuple[Tensor, ...] = ()
    if given_NV is not None:
        most = max(row.sampling.num_logprobs or 0 for _, row in with_logprobs)
        ids_N = ids_R[_numbers(with_logprobs, ids_R.device)].clamp_min(0).long()
        found = logprobs_of(given_NV, ids_N, num_top=most)[:3]
    wait = download([ids_R, *found])

    def chosen() -> list[Chosen | None]:
        ids_R, *logprobs = wait()
        ids = ids_R.tolist()
        if not special:
            return [(token_id, None) if token_id >= 0 else None for token_id in ids]
        by_row = _token_logprobs(with_logprobs, *logprobs) if with_logprobs else {}
        # A NaN comes from the model, but constraints may have set every logit to -inf.
        for i, row in special if min(ids) < 0 else ():
            is_constrained = row.ruled is not None or row.mask is not None
            row.is_contradicted = ids[i] == NO_LOGIT_IS_FINITE and is_constrained
        return [(token_id, by_row.get(i)) if token_id >= 0 else None for i, token_id in enumerate(ids)]

    return Sampled(ids_R, chosen)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at `position`: a hash, the same on every machine."""
    digest = blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8, person=b"token-draw").digest()
    return (int.from_bytes(digest, "little") >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def _forbid(logits_RV: Tensor, rows: Seq[_NumberedRow]) -> None:
    """Set early stop tokens and masked tokens to -inf, in place."""
    vocabulary, device = logits_RV.shape[-1], logits_RV.device
    if early := [(i, row.early_stops()) for i, row in rows if row.is_early]:
        early_2U = _pairs(early)
        _set_impossible(logits_RV, early_2U[:, (early_2U[1] >= 0) & (early_2U[1] < vocabulary)])
    if masked := [(i, row) for i, row in rows if row.mask is not None and row.is_masked]:
        words = [row.mask.allowed(row.tokens, row.num_prompt_tokens) for _, row in masked if row.mask is not None]
        words_NW1 = _place(np.stack(words), torch.int32, device).unsqueeze(-1)
        is_allowed_NV = (words_NW1 >> torch.arange(32, device=device) & 1).flatten(1)[:, :vocabulary].bool()
        masked_N = _numbers(masked, device)
        logits_RV[masked_N] = logits_RV[masked_N].masked_fill(~is_allowed_NV, -math.inf)


def _apply_rules(logits_RV: Tensor, rows: Seq[tuple[int, SamplingRow, TokenRuleTensors]]) -> None:
    """Apply the token rules in place: allowed tokens, bad words, bias."""
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
    """Return (2, U): row and token of each pair."""
    rows_U = np.repeat([i for i, _ in rows], [len(tokens) for _, tokens in rows])
    return np.stack((rows_U, np.concatenate([tokens for _, tokens in rows])))


def _set_impossible(logits_RV: Tensor, pairs_2U: NDArray[np.int64]) -> None:
    device = logits_RV.device
    rows_U, ids_U = _place(pairs_2U, torch.int64, device)
    logits_RV[rows_U, ids_U] = torch.full((), -math.inf, device=device)


def choose_by_kernel(logits_RV: Tensor, rows: Seq[_NumberedRow]) -> Tensor:
    """Return the chosen ids (R,) int32; see launch_choice. rows: those that are not plain."""
    if penalties := {i: row.penalties() for i, row in rows if row.has_penalties}:
        penalise(logits_RV, penalties)
    drawing = [(i, row) for i, row in rows if not row.sampling.is_greedy]
    if not drawing:
        return launch_choice(logits_RV, None)
    numbers_R6 = np.zeros((len(logits_RV), NUM_NUMBERS), dtype=np.int32)
    numbers_R6[[i for i, _ in drawing]] = [numbers_of(row) for _, row in drawing]
    return launch_choice(logits_RV, upload([numbers_R6], logits_RV.device)[0])


def numbers_of(row: SamplingRow) -> tuple[int, ...]:
    """Return the kernel's parameters of a row that draws."""
    draw = int(uniform(row.seed, row.position) * (1 << _DRAW_BITS))
    return *row.filters, draw >> DRAW_BITS, draw & (1 << DRAW_BITS) - 1


def choose_by_torch(logits_RV: Tensor, rows: Seq[_NumberedRow]) -> Tensor:
    """Reference implementation of `choose_by_kernel`, with our CPU kernel for the greedy choice. -> (R,) int64"""
    chosen_R, best_R = likeliest(logits_RV, {i: row.penalties() for i, row in rows if row.has_penalties})
    if drawing := [(i, row) for i, row in rows if not row.sampling.is_greedy]:
        drawing_N = _numbers(drawing, chosen_R.device)
        chosen_R[drawing_N] = reference_draw(logits_RV[drawing_N], [row for _, row in drawing])
    # A finite sum proves all finite, faster than checking each.
    if math.isfinite(sum(best_R.tolist())):
        return chosen_R
    chosen_R = torch.where(best_R.isfinite(), chosen_R, NOT_FINITE)
    return torch.where(best_R == -math.inf, NO_LOGIT_IS_FINITE, chosen_R) if rows else chosen_R


def reference_draw(logits_NV: Tensor, rows: Seq[SamplingRow]) -> Tensor:
    """Draw a token for each row. -> (N,) int64"""
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
    # In fp64 the running sum does not depend on a device's order of summation.
    cumulative_NV = scaled_NV.exp().cumsum(dim=-1, dtype=torch.float64)
    draws_N = _place([uniform(row.seed, row.position) for row in rows], torch.float64, device)
    targets_N1 = draws_N.unsqueeze(-1) * cumulative_NV[:, -1:]
    # Nothing is found in rows with non-finite logits. They fail later, but their id must be a valid index here.
    most = scaled_NV.shape[-1] - 1
    return torch.searchsorted(cumulative_NV, targets_N1, right=True).clamp_max(most).squeeze(-1)


def _keep_top_k(scaled_NV: Tensor, top_k: Seq[int]) -> Tensor:
    """Keep the k greatest logits of each row, and those equal to the k-th."""
    limits = [k if 0 < k < scaled_NV.shape[-1] else 0 for k in top_k]
    if not any(limits):
        return scaled_NV
    greatest_NK = scaled_NV.topk(max(limits), dim=-1).values
    index_N1 = _place([max(0, k - 1) for k in limits], torch.int64, scaled_NV.device).unsqueeze(-1)
    is_off_N1 = _place([k == 0 for k in limits], torch.bool, scaled_NV.device).unsqueeze(-1)
    threshold_N1 = greatest_NK.gather(-1, index_N1).masked_fill(is_off_N1, -math.inf)
    return scaled_NV.masked_fill(scaled_NV < threshold_N1, -math.inf)


def _keep_top_p(scaled_NV: Tensor, top_p: Seq[float]) -> Tensor:
    """Keep the likeliest tokens that together reach probability p, and those equal to the last of them."""
    rows = [i for i, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return scaled_NV
    wanted_N1 = _place([top_p[i] for i in rows], torch.float64, scaled_NV.device).unsqueeze(-1)
    rows_N = _place(rows, torch.int64, scaled_NV.device)
    chosen_NV = scaled_NV[rows_N]
    mass_N1 = row_sums(chosen_NV.exp()) * wanted_N1
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


def _token_logprobs(
    rows: Seq[_NumberedRow], logprobs_N: NDArray[Any], top_ids_NK: NDArray[Any], top_logprobs_NK: NDArray[Any]
) -> dict[int, TokenLogprob]:
    """Return the log-probabilities by row number."""
    chosen, ids, values = logprobs_N.tolist(), top_ids_NK.tolist(), top_logprobs_NK.tolist()
    counts = [row.sampling.num_logprobs or 0 for _, row in rows]
    return {
        i: TokenLogprob(logprob=chosen[n], top=tuple(zip(ids[n][:count], values[n][:count], strict=True)))
        for n, ((i, _), count) in enumerate(zip(rows, counts, strict=True))
    }


def _numbers(rows: Seq[_NumberedRow], device: torch.device) -> Tensor:
    return _place([i for i, _ in rows], torch.int64, device)


def _place(
    values: Seq[float] | NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Upload values; only later work on the device waits for the copy."""
    host = torch.tensor(values, dtype=dtype)
    # The argument `pin_memory=True` is rejected by torch for arrays.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def download(tensors: Seq[Tensor]) -> Callable[[], list[NDArray[Any]]]:
    """Start copying tensors to the host on the copy stream, after the work queued so far.

    Returns a function that waits for the copies. Work queued later neither waits for them nor delays them. All tensors
    must be on one device; CPU tensors are not copied.
    """
    device = tensors[0].device
    device_streams = streams.streams_of(device)
    if device_streams.is_at_once:
        return lambda: [tensor.numpy() for tensor in tensors]
    tensors = [tensor.contiguous() for tensor in tensors]
    computed = device_streams.mark()
    with copy_stream(device).entered():
        computed.hold_up()
        hosts = [device_streams.page_locked(tensor.numel(), tensor.dtype).view(tensor.shape) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            device_streams.copy(host, tensor)
        copied = device_streams.mark()

    def wait() -> list[NDArray[Any]]:
        copied.wait()
        # Refer to the tensors so that their memory is not reused during the copy.
        assert len(tensors) == len(hosts)
        return [host.numpy() for host in hosts]

    return wait


@cache
def copy_stream(device: torch.device) -> DeviceStream:
    return streams.streams_of(device).device_stream()
