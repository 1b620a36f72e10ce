"""Banks of experts on one rank: computed one by one in any format, or on a GPU all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kernels.gated_mul import SILU, GatedActivation
from engine.kernels.moe.expert_tiles import Tiles
from engine.kernels.moe.fused_experts import ExpertBiases, launch_coded_experts, launch_fused_experts
from engine.kernels.quant.code_panels import CodePanels
from engine.layers.layers import Linear, Matrix, TorchMatrix
from engine.layers.low_bit_matrix import CodedMatrix, Int8Matrix

# T tokens, E hidden_size, I features of one expert, X experts, C experts per token, N = T * C choices


class Bank(Protocol):
    """Experts, or a rank's shares of them, at numbered places."""

    def __call__(
        self, x_TE: Tensor, chosen_TC: Tensor, tiles: Tiles | None = None, *, input_weights_TC: Tensor | None = None
    ) -> Tensor:
        """Return the unweighted output of each chosen expert: (T, C, E).

        chosen: int64 places in this bank. tiles: these choices sorted by expert, if available. input_weights: fp32
        factors of each choice's input (Llama 4); not for experts with biases.
        """
        ...

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on the number of tokens, not on the chosen experts."""
        ...


@dataclass(frozen=True)
class Expert:
    """One MLP, or a rank's share of its features."""

    # Rows: gate, up; or up, with an activation without gates.
    gate_up: Linear
    down: Matrix
    # On rank 0 only, if the features are split over ranks.
    down_bias_E: Tensor | None = None
    activation: GatedActivation = SILU

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self.down.multiply(self.gate_up(x_TE), bias_O=self.down_bias_E, before=self.activation)


@dataclass(frozen=True)
class ExpertList:
    """Bank that computes expert by expert, with matrices of any format."""

    experts: list[Expert]

    @property
    def is_fixed(self) -> bool:
        return False

    def __call__(
        self, x_TE: Tensor, chosen_TC: Tensor, tiles: Tiles | None = None, *, input_weights_TC: Tensor | None = None
    ) -> Tensor:
        flat_N = chosen_TC.flatten()
        order_N, counts_X = flat_N.argsort(stable=True), flat_N.bincount(minlength=len(self.experts))
        x_NE = x_TE[order_N // chosen_TC.shape[1]]
        if input_weights_TC is not None:
            x_NE = (x_NE * input_weights_TC.view(-1, 1)[order_N]).to(x_TE.dtype)
        parts = torch.split(x_NE, counts_X.tolist())
        out_NE = x_TE.new_empty(len(flat_N), x_TE.shape[1])
        computed = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        if computed:
            out_NE[order_N] = torch.cat(computed)
        return out_NE.view(*chosen_TC.shape, x_TE.shape[1])


@dataclass(frozen=True)
class ExpertStack:
    """Bank that computes all experts at once, from stacked matrices of one kind.

    Tensors (X, 2 I, E) and (X, E, I), or low-bit ones; see kernels/moe/fused_experts.py.
    """

    gate_up: Tensor | CodePanels
    down: Tensor | CodePanels
    biases: ExpertBiases | None = None
    activation: GatedActivation = SILU

    @property
    def is_fixed(self) -> bool:
        return True

    def __call__(
        self, x_TE: Tensor, chosen_TC: Tensor, tiles: Tiles | None = None, *, input_weights_TC: Tensor | None = None
    ) -> Tensor:
        compute: Any = launch_coded_experts if isinstance(self.gate_up, CodePanels) else launch_fused_experts
        out_TCE: Tensor = compute(
            x_TE,
            self.gate_up,
            self.down,
            chosen_TC,
            tiles,
            activation=self.activation,
            biases=self.biases,
            input_weights_TC=input_weights_TC,
        )
        return out_TCE

    @classmethod
    def of(cls, experts: Sequence[Expert]) -> ExpertStack | None:
        """Stack experts; None if they are not plain tensors on a GPU, nor low-bit ones of one format."""
        gate_up = _stacked([expert.gate_up.matrix for expert in experts])
        down = None if gate_up is None else _stacked([expert.down for expert in experts])
        if gate_up is None or type(down) is not type(gate_up):
            return None
        gate_up_X2I = [expert.gate_up.bias_O for expert in experts if expert.gate_up.bias_O is not None]
        down_XE = [expert.down_bias_E for expert in experts if expert.down_bias_E is not None]
        # Either all experts have biases or none has.
        biases = None
        if gate_up_X2I:
            biases = ExpertBiases(torch.stack(gate_up_X2I), torch.stack(down_XE) if down_XE else None)
        return cls(gate_up, down, biases, experts[0].activation)

    def experts(self) -> list[Expert]:
        """Return the experts one by one, as views."""
        gate_up_X2I, down_XE = self.biases or (None, None)
        return [
            Expert(
                Linear(gate_up, None if gate_up_X2I is None else gate_up_X2I[i]),
                down,
                None if down_XE is None else down_XE[i],
                self.activation,
            )
            for i, (gate_up, down) in enumerate(zip(_matrices(self.gate_up), _matrices(self.down), strict=True))
        ]


def _stacked(matrices: Sequence[Matrix]) -> Tensor | CodePanels | None:
    """Stack matrices of one kind; None for other kinds, and for low-bit matrices with permuted inputs."""
    plain = [matrix.weight_OI for matrix in matrices if isinstance(matrix, TorchMatrix) and matrix.weight_OI.is_cuda]
    if len(plain) == len(matrices):
        return torch.stack(plain)
    panels = [panels for matrix in matrices if (panels := _panels(matrix)) is not None]
    return CodePanels.stack(panels) if len(panels) == len(matrices) else None


def _panels(matrix: Matrix) -> CodePanels | None:
    if isinstance(matrix, Int8Matrix):
        return matrix.panels()
    return matrix.panels if isinstance(matrix, CodedMatrix) else None


def _matrices(stack: Tensor | CodePanels) -> list[Matrix]:
    if isinstance(stack, Tensor):
        return [TorchMatrix(weight_OI) for weight_OI in stack]
    return [CodedMatrix.whole(stack.expert(i)) for i in range(len(stack.words))]


class ExpertSlots:
    """Builder of successive banks that reads only experts that the previous bank did not have."""

    def __init__(self, read: Callable[[int], Expert]) -> None:
        self._read = read
        self._held: dict[int, Expert] = {}

    def __call__(self, indices: Sequence[int]) -> Bank:
        """Return a bank of these experts, in this order."""
        experts = [self._held.get(index) or self._read(index) for index in indices]
        stack = ExpertStack.of(experts)
        self._held = dict(zip(indices, stack.experts() if stack else experts, strict=True))
        return stack or ExpertList(experts)
