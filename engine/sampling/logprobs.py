"""Log-probabilities (natural) from logits: of given tokens and of the likeliest ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.sample import launch_log_norms

# N rows, V vocabulary, K likeliest


class Logprobs(NamedTuple):
    """Log-probabilities of N rows, on the device of the logits."""

    logprobs_N: Tensor  # fp32
    top_ids_NK: Tensor  # int64, likeliest first
    top_logprobs_NK: Tensor
    norms_N1: Tensor  # not finite for rows with non-finite logits


def logprobs_of(logits_NV: Tensor, ids_N: Tensor, *, num_top: int) -> Logprobs:
    """Return the log-probability of each row's token and the `num_top` likeliest. logits_NV: fp32.

    The bits of a row do not depend on the other rows.
    """
    norms_N1 = launch_log_norms(logits_NV) if logits_NV.is_cuda else _logsumexp(logits_NV)
    logprobs_N = (logits_NV.gather(-1, ids_N.unsqueeze(-1)) - norms_N1).squeeze(-1)
    top = logits_NV.topk(min(num_top, logits_NV.shape[-1]), dim=-1)
    return Logprobs(logprobs_N, top.indices, top.values - norms_N1, norms_N1)


def row_sums(x_NV: Tensor) -> Tensor:
    """Return row sums (N, 1) fp64. The bits of a row do not depend on N.

    Torch's `sum` would split a single row over threads, but not one row among others.
    """
    return x_NV.cumsum(dim=-1, dtype=torch.float64)[:, -1:]


def _logsumexp(logits_NV: Tensor) -> Tensor:
    most_N1 = logits_NV.amax(dim=-1, keepdim=True)
    return most_N1 + row_sums((logits_NV - most_N1).exp()).log().float()
