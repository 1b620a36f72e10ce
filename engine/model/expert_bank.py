"""Banks of experts on one rank: computed one by one in any format, or on a GPU all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
        self,
        x_TE: Tensor,
        chosen_TC: Tensor,
        tiles: Tiles | None = None,
        *,
        input_weights_TC: Tensor | None = None,
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
        self,
        x_TE: Tensor,
        chosen_TC: Tensor,
        tiles: Tiles | None = None,
        *,
        input_weights_TC: Tensor | None = None,
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
    """Bank that computes all experts at once, from stacked matrices; see kernels/moe/fused_experts.py."""

    gate_up_X2IE: Tensor
    down_XEI: Tensor
    biases: ExpertBiases | None = None
    activation: GatedActivation = SILU

    @property
    def is_fixed(self) -> bool:
        return True

    def __call__(
        self,
        x_TE: Tensor,
        chosen_TC: Tensor,
        tiles: Tiles | None = None,
        *,
        input_weights_TC: Tensor | None = None,
    ) -> Tensor:
        return launch_fused_experts(
            x_TE,
            self.gate_up_X2IE,
            self.down_XEI,
            chosen_TC,
            tiles,
            activation=self.activation,
            biases=self.biases,
            input_weights_TC=input_weights_TC,
        )

    @classmethod
    def of(cls, experts: Sequence[Expert]) -> ExpertStack | None:
        """Stack experts; None if they are not plain tensors on a GPU."""
        gate_up, down = [expert.gate_up.matrix for expert in experts], [expert.down for expert in experts]
        plain = [m.weight_OI for m in (*gate_up, *down) if isinstance(m, TorchMatrix) and m.weight_OI.is_cuda]
        if len(plain) < 2 * len(experts):
            return None
        stacks = torch.stack(plain[: len(experts)]), torch.stack(plain[len(experts) :])
        return cls(*stacks, _biases_of(experts), experts[0].activation)

    def experts(self) -> list[Expert]:
        """Return the experts one by one, as views."""
        pairs = zip(map(TorchMatrix, self.gate_up_X2IE), map(TorchMatrix, self.down_XEI), strict=True)
        return _experts_of(list(pairs), self.biases, self.activation)


@dataclass(frozen=True)
class CodedExpertStack:
    """Bank that computes all experts at once, from stacked low-bit matrices; see kernels/moe/fused_experts.py."""

    gate_up: CodePanels
    down: CodePanels
    biases: ExpertBiases | None = None
    activation: GatedActivation = SILU

    @property
    def is_fixed(self) -> bool:
        return True

    def __call__(
        self,
        x_TE: Tensor,
        chosen_TC: Tensor,
        tiles: Tiles | None = None,
        *,
        input_weights_TC: Tensor | None = None,
    ) -> Tensor:
        return launch_coded_experts(
            x_TE,
            self.gate_up,
            self.down,
            chosen_TC,
            tiles,
            activation=self.activation,
            biases=self.biases,
            input_weights_TC=input_weights_TC,
        )

    @classmethod
    def of(cls, experts: Sequence[Expert]) -> CodedExpertStack | None:
        """Stack experts; None if they differ in format or have permuted inputs."""
        gate_up = _stacked([expert.gate_up.matrix for expert in experts])
        down = None if gate_up is None else _stacked([expert.down for expert in experts])
        if gate_up is None or down is None:
            return None
        return cls(gate_up, down, _biases_of(experts), experts[0].activation)

    def experts(self) -> list[Expert]:
        """Return the experts one by one, as views."""
        matrices = ((self.gate_up.expert(i), self.down.expert(i)) for i in range(len(self.down.words)))
        pairs = [(CodedMatrix.whole(gate_up), CodedMatrix.whole(down)) for gate_up, down in matrices]
        return _experts_of(pairs, self.biases, self.activation)


def _biases_of(experts: Sequence[Expert]) -> ExpertBiases | None:
    """Stack the biases; either all experts have one or none has."""
    gate_up = [expert.gate_up.bias_O for expert in experts if expert.gate_up.bias_O is not None]
    down = [expert.down_bias_E for expert in experts if expert.down_bias_E is not None]
    return ExpertBiases(torch.stack(gate_up), torch.stack(down) if down else None) if gate_up else None


def _experts_of(
    pairs: Sequence[tuple[Matrix, Matrix]], biases: ExpertBiases | None, activation: GatedActivation
) -> list[Expert]:
    """Return experts of matrices of gate and up, and of down."""
    gate_up_X2I, down_XE = biases or (None, None)
    return [
        Expert(
            Linear(gate_up, None if gate_up_X2I is None else gate_up_X2I[i]),
            down,
            None if down_XE is None else down_XE[i],
            activation,
        )
        for i, (gate_up, down) in enumerate(pairs)
    ]


def _stacked(matrices: Sequence[Matrix]) -> CodePanels | None:
    panels = [panels for matrix in matrices if (panels := _panels(matrix)) is not None]
    return CodePanels.stack(panels) if len(panels) == len(matrices) else None


def _panels(matrix: Matrix) -> CodePanels | None:
    if isinstance(matrix, Int8Matrix):
        return matrix.panels()
    return matrix.panels if isinstance(matrix, CodedMatrix) else None


class ExpertSlots:
    """Builder of successive banks that reads only experts that the previous bank did not have."""

    def __init__(self, read: Callable[[int], Expert]) -> None:
        self._read = read
        self._held: dict[int, Expert] = {}

    def __call__(self, indices: Sequence[int]) -> Bank:
        """Return a bank of these experts, in this order."""
        experts = [self._held.get(index) or self._read(index) for index in indices]
        stack = ExpertStack.of(experts) or CodedExpertStack.of(experts)
        self._held = dict(zip(indices, stack.experts() if stack else experts, strict=True))
        return stack or ExpertList(experts)
