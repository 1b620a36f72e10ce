"""Penalties and greedy choice for the rows of a step."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from engine.batch.device_batch import upload
from engine.cpu.library import Kernels, open_copies
from engine.cpu.structs import CHOICE_ROW, TokenChoices
from engine.sampling.penalties import Penalties

# R rows, V vocabulary, U penalised tokens of all rows

# Number of logits that one thread processes in the time that waking another thread takes.
_FEW = 1 << 16


def likeliest(logits_RV: Tensor, penalties: Mapping[int, Penalties]) -> tuple[Tensor, Tensor]:
    """Apply penalties in place, then return the first greatest logit of each row, or the first NaN.

    A positive logit is divided by the repetition penalty, others are multiplied by it; then presence and frequency
    penalties are subtracted.

    logits_RV: fp32; penalties: by row. Returns ids (R,) int64 and their penalised logits (R,). On a CPU the kernel and
    the torch code agree bit for bit, except that the kernel may leave logits unpenalised if only the greatest one is
    read (`Penalties.is_read`).
    """
    kernels = open_copies(logits_RV.device)
    if kernels is not None and logits_RV.stride(-1) == 1:
        return _by_kernel(kernels, logits_RV, penalties)
    if penalties:
        penalise(logits_RV, penalties)
    ids_R = logits_RV.argmax(dim=-1)
    return ids_R, logits_RV.gather(-1, ids_R.unsqueeze(-1)).squeeze(-1)


def _by_kernel(kernels: Kernels, logits_RV: Tensor, penalties: Mapping[int, Penalties]) -> tuple[Tensor, Tensor]:
    num_rows, vocabulary = logits_RV.shape
    row_R = np.zeros(num_rows, dtype=CHOICE_ROW)
    first, row_bytes = logits_RV.data_ptr(), logits_RV.stride(0) * logits_RV.itemsize
    row_R["logits"] = np.arange(num_rows) * row_bytes + first
    if penalties:
        row_R["penalties"][list(penalties)] = [penalty.address for penalty in penalties.values()]
    kernels.choose(byref(TokenChoices(row_R.ctypes.data, num_rows, vocabulary, num_threads(logits_RV))))
    return torch.from_numpy(row_R["greatest"]), torch.from_numpy(row_R["most"])


def num_threads(logits_RV: Tensor) -> int:
    """Return the number of CPU threads for these logits."""
    return torch.get_num_threads() if logits_RV.numel() > _FEW else 1


def penalise(logits_RV: Tensor, penalties: Mapping[int, Penalties]) -> None:
    """Apply penalties in place with torch operations, on any device."""
    lens = [len(penalty) for penalty in penalties.values()]
    rows_U, ids_U, taken_U, repetition_U = upload(
        [
            np.repeat(np.array(list(penalties)), lens),
            np.concatenate([penalty.token_ids for penalty in penalties.values()]),
            np.concatenate([penalty.taken for penalty in penalties.values()]).view(np.int32),
            np.repeat(np.array([p.repetition for p in penalties.values()], dtype=np.float32), lens).view(np.int32),
        ],
        logits_RV.device,
    )
    x_U, repetition_U = logits_RV[rows_U, ids_U], repetition_U.view(torch.float32)
    x_U = torch.where(x_U > 0, x_U / repetition_U, x_U * repetition_U) - taken_U.view(torch.float32)
    logits_RV[rows_U, ids_U] = x_U
