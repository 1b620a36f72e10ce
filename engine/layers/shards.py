"""Layers from a checkpoint: one rank's share of them, fused, on its device and in its dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.types.errors import SpecError
from engine.cpu.autotune import MeasuredWays
from engine.cpu.library import Kernels
from engine.layers.int8_matrix import Int8Matrix
from engine.layers.layers import Embedding, Linear, Matrix, RMSNorm, RowParallelLinear, Table, TorchMatrix
from engine.layers.low_bit_matrix import CodedMatrix
from engine.layers.packed_matrix import PackedMatrix
from engine.layers.quantized_matrix import QuantizedMatrix
from engine.runner.parallel import TensorParallel
from engine.weights.checkpoint import Checkpoint, Span
from engine.weights.quantized_weight import QuantizedWeight

# int8: each output in 8 bits with its own scale, made at load. quantized: matrices that are stored in few bits stay so
# in memory, and are multiplied so where the device's kernels have their format; else they are widened as they are used
# on a CPU, and at load on a GPU, where nothing of a step is the host's. Otherwise they are widened at load.
WEIGHTS = ("as_stored", "int8", "quantized")


# Is given every matrix of a layer with the names of what it is made of, and returns what takes its place.
OnMatrix = Callable[[Sequence[str], Matrix], Matrix]


@dataclass(frozen=True)
class ShardReader:
    """Reads what one rank needs. Names are Hugging Face's, without `.weight` and `.bias`."""

    checkpoint: Checkpoint
    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels | None = None  # for which matrices are packed; None: for torch
    measured: MeasuredWays | None = None  # who multiplies what; None: kernels all, in one order
    weights: str = "as_stored"  # one of WEIGHTS
    spreads_experts: bool = False  # whole experts on each rank; else a share of each on all
    redundant_experts: int = 0  # places for further copies, over all ranks, where experts are whole
    on_matrix: OnMatrix | None = None

    def __post_init__(self) -> None:
        if self.weights == "int8" and self.kernels is None and self.device.type != "cuda":
            raise SpecError(
                "model.weights: int8 needs a GPU, or dtype bfloat16 and a C++ compiler on the worker's machine"
            )

    def tensor(self, name: str, *, rows: Span | None = None) -> Tensor:
        """A tensor, or some of its rows, by its whole name."""
        return self._place(self.checkpoint.read(name, rows=rows))

    def norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self._place(self.checkpoint.read(f"{name}.weight")), eps)

    def embedding(self, name: str, vocab_size: int) -> Embedding:
        rows = self.parallel.span(vocab_size)
        kept = self._quantized(name, rows=rows)
        table: Table | None = None if kept is None else self._packed(kept)
        if table is None:
            table = TorchMatrix(self._place(self.checkpoint.read(f"{name}.weight", rows=rows)))
        return Embedding(table, rows[0], self.parallel)

    def tied(self, embedding: Embedding) -> Matrix:
        """The token table as the matrix that it also is."""
        table = embedding.table
        return self.matrix(table.weight_OI) if isinstance(table, TorchMatrix) else table

    def linear(self, rows: Mapping[str, Span], *, has_bias: bool = False) -> Linear:
        """One matrix of the given rows of several, in their order."""

        def fused(suffix: str) -> Tensor:
            parts = [self.checkpoint.read(f"{name}.{suffix}", rows=span) for name, span in rows.items()]
            return self._place(parts[0] if len(parts) == 1 else torch.cat(parts))

        parts = [self._quantized(name, rows=span) for name, span in rows.items()]
        kept = [part for part in parts if part is not None]
        matrix = (self._kept(*kept) if len(kept) == len(parts) else None) or self.matrix(fused("weight"))
        return Linear(self._seen(tuple(rows), matrix), fused("bias") if has_bias else None)

    def columns(self, name: str, columns: Span) -> Matrix:
        """Some columns of a matrix, whose product the caller sums over the ranks."""
        kept = self._quantized(name, columns=columns)
        matrix = None if kept is None else self._kept(kept)
        if matrix is None:
            matrix = self.matrix(self._place(self.checkpoint.read(f"{name}.weight", columns=columns)))
        return self._seen((name,), matrix)

    def row_parallel(self, name: str, columns: Span, *, has_bias: bool = False) -> RowParallelLinear:
        """The columns that meet the features which this rank's part of the layer before computes."""
        # The ranks' outputs are summed, so that only one of them may add the bias.
        bias = self._place(self.checkpoint.read(f"{name}.bias")) if has_bias and self.parallel.is_leader else None
        return RowParallelLinear(self.columns(name, columns), bias, self.parallel)

    def matrix(self, weight_OI: Tensor) -> Matrix:
        """In the form in which this rank multiplies it."""
        if self.kernels is None:
            return Int8Matrix.of(weight_OI) if self.weights == "int8" else TorchMatrix(weight_OI)
        pack = PackedMatrix.int8 if self.weights == "int8" else PackedMatrix.bf16
        return self._measured(pack(self.kernels, weight_OI))

    def _kept(self, *weights: QuantizedWeight) -> Matrix | None:
        """In few bits: as the kernels multiply them, or else widened as they are used; None: to be widened now."""
        if self.device.type == "cuda":
            return CodedMatrix.of(weights, self.device)
        return self._packed(*weights) or QuantizedMatrix(weights)

    def _packed(self, *weights: QuantizedWeight) -> PackedMatrix | None:
        packed = None if self.kernels is None else PackedMatrix.few_bits(self.kernels, weights)
        return packed and self._measured(packed)

    def _measured(self, matrix: PackedMatrix) -> PackedMatrix:
        if self.measured is None:
            matrix.fix()
        else:
            matrix.measure(self.measured)
        return matrix

    def _seen(self, names: Sequence[str], matrix: Matrix) -> Matrix:
        return matrix if self.on_matrix is None else self.on_matrix(names, matrix)

    def _quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> QuantizedWeight | None:
        if self.weights != "quantized":
            return None
        return self.checkpoint.quantized(f"{name}.weight", rows=rows, columns=columns)

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()
