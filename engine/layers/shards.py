"""Loading of one rank's share of layers from a checkpoint: fused, on its device and in its dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from core.types.errors import SpecError
from engine.cpu.autotune import MeasuredWays
from engine.cpu.library import Kernels
from engine.layers.layers import Embedding, Linear, Matrix, RMSNorm, RowParallelLinear, Table, TorchMatrix
from engine.layers.low_bit_matrix import CodedMatrix, Int8Matrix
from engine.layers.packed_matrix import PackedMatrix
from engine.runner.parallel import TensorParallel
from engine.weights.checkpoint import Checkpoint, Span
from engine.weights.quantized_weight import QuantizedWeight

# auto: quantized matrices stay in their stored format if the device has a kernel for it, and are dequantized at load
# otherwise. widen: they are dequantized at load. int8: all matrices are quantized at load with one scale per output.
WEIGHTS = ("auto", "widen", "int8")

# Called with each matrix of a layer and the names of its tensors; returns the matrix to use instead.
OnMatrix = Callable[[Sequence[str], Matrix], Matrix]


@dataclass(frozen=True)
class ShardReader:
    """Reader of one rank's weights. Names are Hugging Face's, without `.weight` and `.bias`."""

    checkpoint: Checkpoint
    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device
    # Kernels that matrices are packed for; None: torch.
    kernels: Kernels | None = None
    # Measurements that choose the fastest way per matrix; None: kernels only, in one summation order.
    measured: MeasuredWays | None = None
    # One of WEIGHTS.
    weights: str = "auto"
    # True: each rank holds whole experts. False: each rank holds a share of every expert.
    spreads_experts: bool = False
    # Slots for expert copies over all ranks, with whole experts.
    redundant_experts: int = 0
    on_matrix: OnMatrix | None = None
    # Quantized matrices that "auto" dequantized at load, by reason.
    widened: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weights == "int8" and self.kernels is None and self.device.type != "cuda":
            raise SpecError(
                "model.weights: int8 needs a GPU, or dtype bfloat16 and a C++ compiler on the worker's machine"
            )

    def tensor(self, name: str, *, rows: Span | None = None) -> Tensor:
        """Read a tensor, or some of its rows, by its full name."""
        return self._place(self.checkpoint.read(name, rows=rows))

    def parameter(self, name: str, *rows: Span) -> Tensor:
        """Read a tensor, or spans of its rows, and convert it to fp32."""
        parts = [self.checkpoint.read(name, rows=span).float() for span in rows] or [self.checkpoint.read(name).float()]
        return torch.cat(parts).to(self.device)

    def norm(
        self, name: str, eps: float, *, rows: Span | None = None, adds_one: bool = False, rounds_late: bool = False
    ) -> RMSNorm:
        """Read a norm. adds_one: it multiplies by 1 + weight. rounds_late: see RMSNorm."""
        weight = self._place(self.checkpoint.read(f"{name}.weight", rows=rows))
        weight = weight.float() + 1 if adds_one else weight
        return RMSNorm(weight.float() if rounds_late else weight.to(self.dtype), eps)

    def embedding(self, name: str, vocab_size: int) -> Embedding:
        """Read this rank's rows of the token embedding. Only CPU kernels keep them quantized."""
        rows = self.parallel.span(vocab_size)
        quantized = self._quantized(name, rows=rows)
        table: Table | None = None if quantized is None else self._packed(quantized)
        if table is None:
            table = TorchMatrix(self._place(self._widened(name, quantized, rows=rows)))
        return Embedding(table, rows[0], self.parallel)

    def tied(self, embedding: Embedding) -> tuple[Embedding, Matrix]:
        """Return the token embedding and its output matrix, which share memory unless the matrix is int8."""
        table = embedding.table
        if not isinstance(table, TorchMatrix):
            return embedding, table
        matrix = self.matrix(table.weight_OI)
        if not isinstance(matrix, PackedMatrix) or self.weights == "int8":
            return embedding, matrix
        return replace(embedding, table=matrix), matrix

    def linear(self, rows: Mapping[str, Span | Sequence[Span]], *, has_bias: bool = False) -> Linear:
        """Read the given rows of several matrices as one fused matrix, in order. A matrix has one span or several."""

        def fused(parts: list[Tensor]) -> Tensor:
            return self._place(parts[0] if len(parts) == 1 else torch.cat(parts))

        spans = [(name, span) for name, of_matrix in rows.items() for span in _spans(of_matrix)]
        parts = [self._quantized(name, rows=span) for name, span in spans]
        quantized = [part for part in parts if part is not None]
        matrix = self.in_stored_bits(*quantized) if len(quantized) == len(parts) else None
        if matrix is None:
            pairs = zip(spans, parts, strict=True)
            matrix = self.matrix(fused([self._widened(name, part, rows=span) for (name, span), part in pairs]))
        bias_O = None
        if has_bias:
            bias_O = fused([self.checkpoint.read(f"{name}.bias", rows=span) for name, span in spans])
        return Linear(self._seen(tuple(rows), matrix), bias_O)

    def columns(self, name: str, columns: Span) -> Matrix:
        """Read some columns of a matrix; the caller sums its products over the ranks."""
        quantized = self._quantized(name, columns=columns)
        matrix = None if quantized is None else self.in_stored_bits(quantized)
        if matrix is None:
            matrix = self.matrix(self._place(self._widened(name, quantized, columns=columns)))
        return self._seen((name,), matrix)

    def row_parallel(self, name: str, columns: Span, *, has_bias: bool = False) -> RowParallelLinear:
        """Read the columns for the features that this rank's part of the previous layer computes."""
        # The ranks' outputs are summed, so only rank 0 adds the bias.
        bias = self._place(self.checkpoint.read(f"{name}.bias")) if has_bias and self.parallel.is_leader else None
        return RowParallelLinear(self.columns(name, columns), bias, self.parallel)

    def matrix(self, weight_OI: Tensor) -> Matrix:
        """Convert a weight to the form that this rank multiplies."""
        if self.kernels is None:
            return Int8Matrix.of(weight_OI) if self.weights == "int8" else TorchMatrix(weight_OI)
        pack = PackedMatrix.int8 if self.weights == "int8" else PackedMatrix.bf16
        return self._measured(pack(self.kernels, weight_OI))

    def note_widened(self, name: str, reason: str) -> None:
        """Record that a matrix is held dequantized, if the checkpoint has it quantized."""
        if self.weights == "auto" and self.checkpoint.is_quantized(f"{name}.weight"):
            names = self.widened.setdefault(reason, [])
            if name not in names:
                names.append(name)

    def _widened(
        self, name: str, part: QuantizedWeight | None, *, rows: Span | None = None, columns: Span | None = None
    ) -> Tensor:
        """Return a slice of a matrix dequantized, and record it. part: the slice, if it was read quantized."""
        self.note_widened(name, self._no_kernel)
        if part is not None:
            return part.rows(0, part.shape[0])
        return self.checkpoint.read(f"{name}.weight", rows=rows, columns=columns)

    @property
    def _no_kernel(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        device = "GPU" if self.device.type == "cuda" else "CPU"
        return f"this {device} has no kernel for their format in {dtype}, or blocks of the format cross a rank's share"

    def in_stored_bits(self, *weights: QuantizedWeight) -> Matrix | None:
        """Return a matrix that stays quantized; None if the device has no kernel for it."""
        if self.device.type != "cuda":
            return self._packed(*weights)
        matrix = Int8Matrix.as_stored(weights, self.device) or CodedMatrix.of(weights, self.device)
        if isinstance(matrix, CodedMatrix) and self.measured is not None:
            matrix.measure(self.measured)
        return matrix

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
        if self.weights != "auto":
            return None
        return self.checkpoint.quantized(f"{name}.weight", rows=rows, columns=columns)

    def _place(self, tensor: Tensor) -> Tensor:
        # Copy, because a single view of a file would keep all of its pages resident.
        return tensor.to(device=self.device, dtype=self.dtype, copy=True).contiguous()


def _spans(spans: Span | Sequence[Span]) -> Sequence[Span]:
    match spans:
        case (int(start), int(end)):
            return [(start, end)]
        case _:
            return spans
