"""Safetensors checkpoints with quantized matrices in the formats of engine.weights.formats."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.model.weight_formats import INSTEAD
from core.types.errors import SpecError
from engine.weights.checkpoint import FLOATS, SafetensorsCheckpoint, Shape, Span
from engine.weights.formats import (
    COLUMNS,
    COMPANIONS,
    FORMATS,
    LEVELS,
    NESTED,
    NESTED_LEVELS,
    ORDERS,
    SHAPE,
    STATES,
    Declared,
    Part,
    StoredFormat,
    activations_of,
    kind_of,
    stored_format,
)
from engine.weights.quantized_weight import (
    GroupedWeight,
    QuantizedWeight,
    ScaledColumns,
    is_special,
    pack_4_bits,
    unpack,
)

# O outputs, I inputs, G groups of inputs

_ENDS = {row.codes.name for row in FORMATS}
# Bits of a stored word, by dtype; other dtypes have 8.
_WIDTHS = {"I32": 32, "I16": 16}
# GPTQModel stores codes of other widths in planes.
_GPTQ_BITS = (2, 3, 4, 8)
_PACKED = ".weight_packed"
_AGAIN = "download the file again"


@dataclass(frozen=True)
class _Matrix:
    """Quantized matrix. stem: start of its tensors' names. expert: index in tensors that hold all experts."""

    format: StoredFormat
    stem: str
    shape: tuple[int, int]
    bits: int
    expert: int | None = None


class QuantizedCheckpoint:
    """Implements Checkpoint: presents matrices under their unquantized names and shapes."""

    def __init__(self, plain: SafetensorsCheckpoint, config: Mapping[str, Any]) -> None:
        """config: quantization settings of the checkpoint. Raises SpecError for unsupported formats."""
        self._plain = plain
        self._declared, self._kind, self._activations = Declared.of(config), kind_of(config), activations_of(config)
        self._is_gptq = config.get("quant_method") == "gptq"
        # GPTQModel's FP8 divides by the scales, also in settings without this key. No other FP8 has one of those two.
        is_gptq_model = config.get("quant_method") == "fp8" and bool(
            {"checkpoint_format", "weight_scale_method"} & {*config}
        )
        self._is_inverse = config.get("weight_scale_semantics", "inverse" if is_gptq_model else "") == "inverse"
        self.unindexed = plain.unindexed
        self._matrices: dict[str, _Matrix] = {}
        # Biases of single experts: the stored tensor, and the expert's index.
        self._biases: dict[str, tuple[str, int]] = {}
        self.shapes: dict[str, Shape] = dict(plain.shapes)
        for name in plain.shapes:
            end = "_blocks" if name.endswith("_blocks") else name[name.rfind(".") :]
            stem = name.removesuffix(end)
            if end in _ENDS and (row := stored_format(stem, end, plain.dtypes, self._kind)):
                self._locate(stem, row)
            elif name.endswith("_proj") and plain.dtypes[name] not in FLOATS:
                raise SpecError(
                    f"{name} ({plain.dtypes[name]}): experts in one tensor are read as MXFP4 blocks only; {INSTEAD}"
                )

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        weight = self.quantized(name, rows=rows, columns=columns)
        if weight is not None:
            return weight.rows(0, weight.shape[0])
        if name in self._biases:
            stored, expert = self._biases[name]
            return self._plain.read(stored, rows=(expert, expert + 1))[0, slice(*rows or (None,))]
        return self._plain.read(name, rows=rows, columns=columns)

    def is_quantized(self, name: str) -> bool:
        return name in self._matrices

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> QuantizedWeight | None:
        matrix = self._matrices.get(name)
        if matrix is None:
            return None
        rows, columns = rows or (0, matrix.shape[0]), columns or (0, matrix.shape[1])
        read = self._flat if matrix.format.codes.dims == ("flat",) else self._grouped
        weight, factors = read(matrix, rows, columns), matrix.stem + COLUMNS
        if factors not in self._plain.shapes:
            return weight
        factors_I = _finite(factors, self._plain.read(factors)).flatten()
        if len(factors_I) != matrix.shape[1] or self._plain.dtypes[factors] not in FLOATS:
            raise SpecError(f"{factors} is not {matrix.shape[1]} numbers, one per input; {_AGAIN}")
        return ScaledColumns(weight, factors_I[slice(*columns)].float())

    # ---- Names and shapes ----

    def _locate(self, stem: str, row: StoredFormat) -> None:
        """Present a matrix, or the matrices of all experts, in place of their tensors."""
        parts = [part.name for part in (row.codes, row.scales, row.zeros) if part]
        for end in (*parts, row.factor, *COMPANIONS):
            if end:
                self.shapes.pop(stem + end, None)
        self._check_dimensions(stem, row)
        if "E" not in row.codes.dims:
            self._present(stem, row, stem)
            return
        (layer, _, projection), bias = stem.rpartition("."), self.shapes.pop(f"{stem}_bias", None)
        for expert in range(self._plain.shapes[stem + row.codes.name][0]):
            name = f"{layer}.{expert}.{projection}"
            self._present(name, row, stem, expert)
            if bias:
                self._biases[f"{name}.bias"] = (f"{stem}_bias", expert)
                self.shapes[f"{name}.bias"] = bias[1:]

    def _check_dimensions(self, stem: str, row: StoredFormat) -> None:
        """Raise SpecError if a tensor is empty, or its dimensions do not fit its format."""
        for part in (row.codes, row.scales, row.zeros):
            if part is None or (shape := self._plain.shapes.get(name := stem + part.name)) is None:
                continue
            if 0 in shape:
                raise SpecError(f"{name} is empty; {_AGAIN}")
            # A scale may be one for all, or one per output. Experts' codes are in groups.
            least = 3 if "E" in part.dims else 0 if row.codes.dims == ("O", "I") and part is not row.codes else 2
            most = (4 if part is row.codes else 3) if "E" in part.dims else 2
            if part.dims != ("flat",) and not least <= len(shape) <= most:
                raise SpecError(f"{name} has {len(shape)} dimensions, expected {most}")
            if "E" in part.dims and shape[0] != self._plain.shapes[stem + row.codes.name][0]:
                raise SpecError(f"{name} has {shape[0]} experts, but {stem}{row.codes.name} has others; {_AGAIN}")

    def _present(self, name: str, row: StoredFormat, stem: str, expert: int | None = None) -> None:
        if f"{name}.weight" in self._matrices or (
            row.codes.name != ".weight" and f"{name}.weight" in self._plain.shapes
        ):
            raise SpecError(f"{name}.weight is in the files in two formats; remove the tensors of one")
        shape, bits = self._shape(stem, row)
        self._matrices[f"{name}.weight"] = _Matrix(row, stem, shape, bits, expert)
        self.shapes[f"{name}.weight"] = shape

    def _shape(self, stem: str, row: StoredFormat) -> tuple[tuple[int, int], int]:
        """Return the outputs and inputs of a matrix, and the bits of its codes."""
        if row.codes.dims == ("flat",):
            first, second = self._state(stem)["shape"]
            return (first, second), row.bits
        name, shapes = stem + row.codes.name, self._plain.shapes
        stored = shapes[name]
        if row.codes.dims[0] == "E":
            stored = (stored[1], math.prod(stored[2:]))
        width, bits = _WIDTHS.get(self._plain.dtypes[name], 8), row.bits
        if row.codes_of:
            num_outputs = shapes[stem + row.scales.name][1]
            return (num_outputs, math.prod(stored) * width // bits // num_outputs), bits
        if stem + SHAPE in shapes:
            num_inputs = self._stored_shape(stem)[1]
            fitting = [b for b in range(2, 9) if -(-num_inputs * b // width) == stored[1]]
            fitting = [b for b in fitting if b in (self._declared.bits or fitting)]
            bits = fitting[0] if len(fitting) == 1 else 0
        elif row.codes.name == _PACKED and bits == 0:
            raise SpecError(f"{stem}{SHAPE} is missing; {_AGAIN}")
        elif row.order:
            # Libraries disagree about the order of other bits.
            bits = stored[-1] * width // shapes[stem + row.scales.name][-1]
        elif bits == 0 and row.zeros and stem + row.zeros.name in shapes:
            bits = shapes[stem + row.zeros.name][-1] * width // stored[1]
        if bits not in range(2, 9) or (self._is_gptq and bits not in _GPTQ_BITS) or bits != (row.bits or bits):
            raise SpecError(f"{name}: codes of {bits or 'unknown'} bits are not supported; {INSTEAD}")
        sizes = {
            dim[0]: size * width // bits if "/" in dim else size
            for dim, size in zip(row.codes.dims[-2:], stored, strict=True)
        }
        if stem + SHAPE in shapes:
            sizes["I"] = num_inputs
        return (sizes["O"], sizes["I"]), bits

    def _stored_shape(self, stem: str) -> tuple[int, int]:
        """Return the outputs and inputs that the file gives beside packed codes."""
        stored, (rows, _) = self._plain.read(stem + SHAPE), self._plain.shapes[stem + _PACKED]
        if stored.numel() == 2 and not stored.is_floating_point():
            num_outputs, num_inputs = (int(number) for number in stored.flatten())
            if num_outputs == rows and num_inputs > 0:
                return num_outputs, num_inputs
        raise SpecError(f"{stem}{SHAPE} is {stored.tolist()}, expected {rows} outputs and their inputs; {_AGAIN}")

    def _state(self, stem: str) -> dict[str, Any]:
        """Return the settings that bitsandbytes stores with a 4-bit matrix."""
        name = next((stem + end for end in STATES if stem + end in self._plain.shapes), f"{stem}{STATES[0]}")
        try:
            state: dict[str, Any] = json.loads(bytes(self._plain.read(name).tolist()))
            shape, block = state["shape"], state["blocksize"]
            sizes = (*shape, block, state.get("nested_blocksize", 1))
            offset = state.get("nested_offset", 0.0)
            if (
                len(shape) == 2
                and all(type(number) is int and 0 < number < 1 << 62 for number in sizes)
                and math.isfinite(offset)
            ):
                return {"nested_blocksize": 1, "nested_offset": 0.0} | state
        except (KeyError, TypeError, ValueError):
            pass
        raise SpecError(f"{name} does not hold the shape and blocksize of a 4-bit matrix; download the file again")

    # ---- Numbers ----

    def _grouped(self, matrix: _Matrix, rows: Span, columns: Span) -> GroupedWeight:
        row, scales = matrix.format, self._scales(matrix)
        block_o, block_i = self._blocks(matrix, tuple(scales.shape))
        group_I = self._groups(matrix, torch.arange(matrix.shape[1]) // block_i, scales.shape[1])[slice(*columns)]
        first, end = int(group_I.min()), int(group_I.max()) + 1
        block_R = torch.arange(*rows) // block_o
        codes, zeros = self._codes(matrix, rows, columns), self._zeros(matrix, scales)
        if matrix.bits > 4 and row.has_middle:
            middle = 1 << (matrix.bits - 1)
            codes, zeros = (codes - middle).view(torch.int8), None if zeros is None else zeros - middle
        scales_OG = scales[block_R, first:end]
        return GroupedWeight(
            codes,
            scales_OG if row.constant == 1 else scales_OG.float() * row.constant,
            None if zeros is None else _compact(zeros[block_R, first:end]),
            group_I - first,
            None if row.levels is None else torch.tensor(row.levels),
            self._factors(matrix, rows),
            self._activations,
        )

    def _flat(self, matrix: _Matrix, rows: Span, columns: Span) -> GroupedWeight:
        """Read rows of bitsandbytes' 4-bit codes, whose blocks run through all rows; the first code is the high one."""
        stem, state, num_inputs = matrix.stem, self._state(matrix.stem), matrix.shape[1]
        self._check_flat(matrix, state)
        first, end = (row * num_inputs for row in rows)
        # bitsandbytes may store the codes' bytes as numbers of a wider dtype.
        size = 2 * self._plain.read(name := stem + matrix.format.codes.name, rows=(0, 1)).element_size()
        pairs = self._plain.read(name, rows=(first // size, -(-end // size))).flatten().view(torch.uint8)
        codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()[first % size :][: end - first]
        scales = self._plain.read(stem + matrix.format.scales.name)
        if stem + NESTED in self._plain.shapes:
            nested = self._plain.read(stem + NESTED)[torch.arange(len(scales)) // state["nested_blocksize"]]
            levels = self._plain.read(stem + NESTED_LEVELS)
            scales = levels[scales.long()] * nested + float(state["nested_offset"])
        # Number of consecutive inputs that share a block in every row.
        size = math.gcd(num_inputs, state["blocksize"])
        start_RG = torch.arange(*rows).unsqueeze(1) * num_inputs + torch.arange(0, num_inputs, size)
        group_I = torch.arange(*columns) // size
        scales_OG = _finite(stem + matrix.format.scales.name, scales)[start_RG // state["blocksize"]]
        return GroupedWeight(
            pack_4_bits(codes.view(-1, num_inputs)[:, slice(*columns)]),
            scales_OG[:, int(group_I[0]) : int(group_I[-1]) + 1],
            None,
            group_I - group_I[0],
            self._plain.read(stem + LEVELS).float(),
        )

    def _check_flat(self, matrix: _Matrix, state: Mapping[str, Any]) -> None:
        """Raise SpecError unless each tensor of bitsandbytes' 4-bit codes has as many numbers as the settings imply."""
        stem, numbers = matrix.stem, math.prod(matrix.shape)
        num_blocks = -(-numbers // state["blocksize"])
        needed = {matrix.format.scales.name: num_blocks, LEVELS: 16}
        is_nested = self._plain.dtypes[stem + matrix.format.scales.name] == "U8"
        if is_nested:
            needed |= {NESTED: -(-num_blocks // state["nested_blocksize"]), NESTED_LEVELS: 256}
        for end, count in needed.items():
            shape, dtype = self._plain.shapes.get(stem + end), self._plain.dtypes.get(stem + end)
            is_code = is_nested and end == matrix.format.scales.name
            if shape != (count,) or not (is_code or dtype in FLOATS):
                found = "is missing" if shape is None else f"has shape {shape} and dtype {dtype}"
                raise SpecError(f"{stem}{end} {found}, expected {count} numbers; {_AGAIN}")
        codes = stem + matrix.format.codes.name
        stored, size = self._plain.shapes[codes], self._plain.read(codes).element_size()
        if not stored or math.prod(stored[1:]) != 1 or stored[0] * size != -(-numbers // 2):
            raise SpecError(f"{codes} does not hold {matrix.shape[0]} x {matrix.shape[1]} codes of 4 bits; {_AGAIN}")
        for end in needed:
            _finite(stem + end, self._plain.read(stem + end))

    def _codes(self, matrix: _Matrix, rows: Span, columns: Span) -> Tensor:
        """Read codes as GroupedWeight holds them."""
        row, is_packed = matrix.format, matrix.bits <= 4
        if row.codes_of:
            whole = self._converted(matrix, row.codes, row.codes_of)
            if tuple(whole.shape) != matrix.shape:
                found = self._plain.shapes[matrix.stem + row.codes.name]
                raise SpecError(f"{matrix.stem}{row.codes.name} of shape {found} does not fit {matrix.shape}; {_AGAIN}")
            codes = whole[slice(*rows), slice(*columns)]
        elif matrix.bits == 4 and "I/" in row.codes.dims and row.order is None and columns[0] % 2 == 0:
            # Two codes are a byte already.
            return self._oriented(matrix, row.codes, 8, rows, (columns[0] // 2, -(-columns[1] // 2))).contiguous()
        else:
            codes = self._oriented(matrix, row.codes, matrix.bits, rows, columns)
        if codes.is_floating_point() and bool(is_special(codes).any()):
            raise SpecError(f"{matrix.stem}{row.codes.name} has a code that is not a finite number; {_AGAIN}")
        codes = codes ^ 8 if row.is_signed else codes
        return pack_4_bits(codes) if is_packed else codes.contiguous()

    def _oriented(self, matrix: _Matrix, part: Part, bits: int, rows: Span, others: Span) -> Tensor:
        """Read and unpack numbers of these outputs, and of these inputs or groups, with the outputs first."""
        dims, name = part.dims[-2:], matrix.stem + part.name
        spans = [rows if dim[0] == "O" else others for dim in dims]
        packed = next((i for i, dim in enumerate(dims) if "/" in dim), None)
        width, stored = _WIDTHS.get(self._plain.dtypes[name], 8), self._plain.shapes[name]
        if packed is not None:
            start, end = (number * bits for number in spans[packed])
            spans[packed] = (start // width, -(-end // width))
            if matrix.expert is None and stored[packed] < spans[packed][1]:
                raise SpecError(f"{name} of shape {stored} has too few codes of {bits} bits; {_AGAIN}")
        if matrix.expert is None:
            numbers = self._plain.read(name, rows=spans[0], columns=spans[1])
        else:
            whole = self._plain.read(name, rows=(matrix.expert, matrix.expert + 1))[0].flatten(1)
            numbers = whole[slice(*spans[0]), slice(*spans[1])]
        if part is matrix.format.zeros and matrix.format.is_less_one and 8 % bits == 0:
            # Subtracted from whole words: a zero of 0 borrows from the next one.
            numbers = numbers + sum(1 << at for at in range(0, width, bits))
        if packed is not None:
            numbers = numbers.T if packed == 0 else numbers
            numbers = unpack(numbers, bits, start % width, (end - start) // bits, matrix.format.order)
            return numbers.T if dims[packed] == "O/" else numbers
        return numbers if dims[0] == "O" else numbers.T

    def _converted(self, matrix: _Matrix, part: Part, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Read a tensor into the order of outputs. Raises SpecError for shapes that do not fit its layout."""
        name = matrix.stem + part.name
        try:
            return convert(self._plain.read(name))
        except RuntimeError as error:
            shape = self._plain.shapes[name]
            raise SpecError(f"{name} of shape {shape} is not in the layout {matrix.format.kind}; {_AGAIN}") from error

    def _scales(self, matrix: _Matrix) -> Tensor:
        """Read all scales, (blocks of outputs, groups), in their dtype."""
        part, name = matrix.format.scales, matrix.stem + matrix.format.scales.name
        if matrix.format.scales_of:
            scales = self._converted(matrix, part, matrix.format.scales_of)
        elif matrix.expert is None:
            scales = self._plain.read(name)
        else:
            scales = self._plain.read(name, rows=(matrix.expert, matrix.expert + 1))[0]
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        # Convert to fp32 first: torch cannot divide by e8m0.
        scales = _finite(name, 1 / _finite(name, scales).float() if self._is_inverse else scales)
        scales = scales.view(-1, 1) if scales.dim() < 2 else scales.flatten(1)
        return scales.T if part.dims[0] == "G" else scales

    def _zeros(self, matrix: _Matrix, scales: Tensor) -> Tensor | None:
        """Read zeros in the order of the scales; None if codes have no zero but 0."""
        row, part = matrix.format, matrix.format.zeros
        if part is None or (name := matrix.stem + part.name) not in self._plain.shapes:
            if part and (row.kind or (self._declared.is_asymmetric and row.levels is None)):
                raise SpecError(f"{matrix.stem}{part.name} is missing; {_AGAIN}")
            return torch.tensor(1 << (matrix.bits - 1)).expand(scales.shape) if row.has_middle else None
        if self._plain.dtypes[name] not in part.dtypes:
            raise SpecError(f"{name} has dtype {self._plain.dtypes[name]}, expected {' or '.join(part.dtypes)}")
        if row.codes.dims == ("O", "I"):
            zeros = self._plain.read(name).float()
            if not bool(zeros.any()):
                return None
            zeros = zeros.view(-1, 1) if zeros.dim() < 2 else zeros
        else:
            zeros = self._oriented(matrix, part, matrix.bits, (0, scales.shape[0]), (0, scales.shape[1]))
        if zeros.shape != scales.shape:
            stored = self._plain.shapes[name]
            raise SpecError(f"{name} with shape {stored} does not match the scales of {tuple(scales.shape)} groups")
        if row.is_less_one and 8 % matrix.bits:
            zeros = zeros + 1 & (1 << matrix.bits) - 1
        if row.kind and self._declared.is_symmetric and bool((zeros != (middle := 1 << (matrix.bits - 1))).any()):
            raise SpecError(
                f"{name}, read in the layout {row.kind}, has zero points other than {middle}, but quantization_config "
                "has sym: true; correct its checkpoint_format (gptq, gptq_v2), packing_format or sym"
            )
        return _finite(name, row.zeros_of(zeros, scales) if row.zeros_of else zeros.float())

    def _blocks(self, matrix: _Matrix, found: Shape) -> tuple[int, int]:
        """Return the outputs and inputs per scale: the first size of the settings that fits the scales' shape."""
        (num_outputs, num_inputs), row = matrix.shape, matrix.format
        # bitsandbytes' INT8 settings do not name its one scale per output.
        own = [(1, row.group)] if row.group or row.constant != 1 else []
        declared = own or self._declared.sizes
        whole = [(min(o or num_outputs, num_outputs), min(i or num_inputs, num_inputs)) for o, i in declared]
        fitting = [size for size in dict.fromkeys(whole) if self._fits(matrix, size, found)]
        name = matrix.stem + row.scales.name
        if len(fitting) > 1:
            raise SpecError(
                f"{name}: scales of shape {found} fit blocks of {' and of '.join(f'{o} x {i}' for o, i in fitting)} in "
                "quantization_config; leave the settings of one"
            )
        if not fitting and not own and not self._declared.has_all_sizes:
            derived = [(num_outputs, num_inputs)]
            if num_inputs % found[1] == 0:
                derived.append((1, num_inputs // found[1]))
            if row.codes.dims == ("O", "I"):
                derived.append((128, 128))
            fitting = [size for size in derived if self._fits(matrix, size, found)]
        if fitting:
            return fitting[0]
        named = "" if own or not whole else f" in blocks of {' or '.join(f'{o} x {i}' for o, i in whole)}"
        raise SpecError(
            f"{name}: scales of shape {found} do not fit {num_outputs} outputs and {num_inputs} inputs{named}"
        )

    @staticmethod
    def _fits(matrix: _Matrix, size: tuple[int, int], found: Shape) -> bool:
        (num_outputs, num_inputs), (block_o, block_i) = matrix.shape, size
        num_groups = -(-num_inputs // block_i)
        if matrix.format.kind.startswith("gemv"):
            # AutoAWQ pads groups to whole words, and to several of them where groups are small.
            whole = 8 * max(1, 128 // block_i)
            num_groups = -(-num_groups // whole) * whole
        return found[1] == num_groups and found[0] == -(-num_outputs // block_o)

    def _groups(self, matrix: _Matrix, in_order_I: Tensor, num_groups: int) -> Tensor:
        """Return the group of each input, (I,) int64. A stored tensor of only -1 means groups in order."""
        names = [name for end in ORDERS if 0 not in self._plain.shapes.get(name := matrix.stem + end, (0,))]
        if not names:
            if self._declared.has_order and matrix.format.bits == 0 and num_groups > 1:
                raise SpecError(f"{matrix.stem} has no g_idx, which its settings (desc_act, actorder) need; {_AGAIN}")
            return in_order_I
        (name, *_), stored = names, self._plain.read(names[0])
        if stored.dtype not in (torch.int32, torch.int64):
            raise SpecError(f"{name} has dtype {stored.dtype}, expected int32; {_AGAIN}")
        if bool(((group_I := stored.long()) == -1).all()):
            return in_order_I
        if group_I.shape != in_order_I.shape or not bool(((group_I >= 0) & (group_I < num_groups)).all()):
            raise SpecError(f"{name} does not match {len(in_order_I)} inputs in {num_groups} groups")
        return group_I

    def _factors(self, matrix: _Matrix, rows: Span) -> Tensor | None:
        row, name = matrix.format, matrix.stem + matrix.format.factor
        if not row.factor:
            return None
        if self._plain.dtypes[name] not in FLOATS:
            raise SpecError(f"{name} has dtype {self._plain.dtypes[name]}, expected a float; {_AGAIN}")
        factor = _finite(name, self._plain.read(name).float())
        if factor.numel() != 1 or not bool(factor.all()):
            raise SpecError(f"{name} is {factor.tolist()}, expected one number other than 0; {_AGAIN}")
        factor = _finite(name, 1 / factor) if row.divides else factor
        return factor.flatten().expand(rows[1] - rows[0])


def _finite(name: str, scales: Tensor) -> Tensor:
    if not bool(scales.float().isfinite().all()):
        raise SpecError(f"{name} has a scale that is not a finite number; {_AGAIN}")
    return scales


def _compact(zeros_OG: Tensor) -> Tensor | None:
    """Return zeros in the smallest dtype, as one repeated number if all are equal; None if all are 0."""
    low, high = (float(number) for number in zeros_OG.aminmax())
    if low == high == 0:
        return None
    is_whole = torch.equal(zeros_OG, zeros_OG.round())
    dtype = torch.uint8 if low >= 0 and high < 256 else torch.int8 if -129 < low and high < 128 else torch.float32
    zeros_OG = zeros_OG.to(dtype if is_whole else torch.float32)
    return zeros_OG[:1, :1].expand(zeros_OG.shape) if low == high else zeros_OG
