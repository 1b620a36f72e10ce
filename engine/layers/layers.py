"""Building blocks of dense decoders on one rank. Independent of weight files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.gated_mul import GatedActivation
from engine.kernels.moe.expert_sum import ExpertSum
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.runner.parallel import TensorParallel

# T tokens, I input features, O output features, V vocabulary rows of this rank

# CPUs without bf16 instructions multiply bf16 matrices at a quarter of the fp32 speed, and fp16 at a tenth. From this
# many rows on, converting the weights first is faster (measured on one Cascade Lake core, 576 to 1536 features; 8 rows:
# even, 64 rows: half the time, 512 rows: a quarter).
_ROWS_WORTH_CONVERTING = 8
# Weights per chunk; larger chunks would spill from the cache to memory.
_CONVERTED_AT_ONCE = 1 << 20
_CPU_HAS_BF16 = torch.cpu._is_avx512_bf16_supported()


class Matrix(Protocol):
    """Matrix of O outputs and I inputs that multiplies rows."""

    @property
    def is_fixed(self) -> bool:
        """True if a product launches the same device work for any values, so that it can be captured in a graph."""
        ...

    def multiply(
        self,
        x_TI: Tensor,
        *,
        bias_O: Tensor | None = None,
        before: Before | None = None,
        residual_TO: Tensor | None = None,
    ) -> Tensor:
        """Compute residual + (before(x) @ weight.T + bias): (T, O), accumulated in fp32 (or exact integers).

        `before` may change the number of features. The result is rounded to x's dtype before the residual is added.
        """
        ...


@dataclass(frozen=True)
class TorchMatrix:
    """Matrix stored as a tensor, on any device."""

    is_fixed = True

    weight_OI: Tensor

    @property
    def num_outputs(self) -> int:
        return self.weight_OI.shape[0]

    def rows(self, rows_T: Tensor) -> Tensor:
        return F.embedding(rows_T, self.weight_OI)

    def multiply(
        self,
        x_TI: Tensor,
        *,
        bias_O: Tensor | None = None,
        before: Before | None = None,
        residual_TO: Tensor | None = None,
    ) -> Tensor:
        product_TO = linear(x_TI if before is None else before(x_TI), self.weight_OI, bias_O)
        return product_TO if residual_TO is None else residual_TO + product_TO


@dataclass(frozen=True)
class Linear:
    """Whole matrix, or this rank's share of its rows (column parallel: no communication)."""

    matrix: Matrix
    bias_O: Tensor | None = None

    def __call__(self, x_TI: Tensor, *, before: Before | None = None) -> Tensor:
        return self.matrix.multiply(x_TI, bias_O=self.bias_O, before=before)


@dataclass(frozen=True)
class RowParallelLinear:
    """This rank's share of a matrix's columns; the ranks' outputs are summed. Only rank 0 holds the bias."""

    matrix: Matrix
    bias_O: Tensor | None
    parallel: TensorParallel

    def __call__(self, x_TI: Tensor, *, before: Before | None = None, residual_TO: Tensor | None = None) -> Tensor:
        if self.parallel.size == 1:
            return self.matrix.multiply(x_TI, bias_O=self.bias_O, before=before, residual_TO=residual_TO)
        product_TO = self.parallel.all_reduce(self.matrix.multiply(x_TI, bias_O=self.bias_O, before=before))
        return product_TO if residual_TO is None else residual_TO + product_TO


def is_plain(*parts: Linear | RowParallelLinear) -> bool:
    """Return True if all products can be captured in a graph; see Matrix."""
    return all(part.matrix.is_fixed for part in parts)


def rounded(factor: float, dtype: torch.dtype) -> float:
    """Round a factor to the activations' dtype, as transformers does with embedding scales."""
    return float(torch.tensor(factor, dtype=dtype, device="cpu"))


class Table(Matrix, Protocol):
    """Matrix with row lookup."""

    @property
    def num_outputs(self) -> int: ...

    def rows(self, rows_T: Tensor) -> Tensor:
        """Look up rows: (T, O) in the activations' dtype."""
        ...


@dataclass(frozen=True)
class Embedding:
    """This rank's rows of the token embedding, starting at row `first`."""

    table: Table
    first: int
    parallel: TensorParallel

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return self.table.rows(token_ids_T)
        local_T = token_ids_T - self.first
        is_ours_T = (local_T >= 0) & (local_T < self.table.num_outputs)
        rows_TO = self.table.rows(torch.where(is_ours_T, local_T, 0))
        return self.parallel.all_reduce(rows_TO * is_ours_T.unsqueeze(-1))


@dataclass(frozen=True)
class RMSNorm:
    """RMS norm, x / rms(x) * weight over the last dimension; Zhang and Sennrich 2019, arXiv:1910.07467.

    Rounds where transformers does: to the activations' dtype before the weight is applied, or once after it.
    """

    # fp32 if the norm rounds once; Gemma's includes the 1 of (1 + weight).
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def of_sum(
        self, x_TE: Tensor, update_TE: Tensor | None, *, experts: ExpertSum | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum (x + experts) + update, and its norm."""
        return add_rms_norm(x_TE, update_TE, self.weight, self.eps, experts=experts)

    @property
    def rounds_late(self) -> bool:
        """True if the result is rounded once, after the weight is applied."""
        return self.weight.dtype == torch.float32


# Operations that a matrix can fuse in front of its product.
Before = RMSNorm | GatedActivation


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute x @ weight.T + bias, accumulated in fp32 and rounded once to x's dtype."""
    is_slow = x_TI.device.type == "cpu" and x_TI.dtype != torch.float32 and not _CPU_HAS_BF16
    if not is_slow or x_TI.shape[0] < _ROWS_WORTH_CONVERTING:
        return F.linear(x_TI, weight_OI, bias_O)
    wide_TI = x_TI.float()
    out_TO = torch.empty(x_TI.shape[0], weight_OI.shape[0], dtype=x_TI.dtype)
    step = max(1, _CONVERTED_AT_ONCE // weight_OI.shape[1])
    for start in range(0, weight_OI.shape[0], step):
        rows = slice(start, start + step)
        bias = None if bias_O is None else bias_O[rows].float()
        out_TO[:, rows] = F.linear(wide_TI, weight_OI[rows].float(), bias)
    return out_TO
