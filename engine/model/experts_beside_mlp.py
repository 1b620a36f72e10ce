"""Experts that run beside a dense MLP, each with norms of its own: Gemma 4.

x + norm(norm_1(mlp(norm(x))) + norm_2(experts(norm_3(x))))         the router sees x / rms(x) * scale / sqrt(E)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from core.model.shape import ModelConfig
from engine.kernels.moe.expert_sum import ExpertSum
from engine.layers.layers import RMSNorm
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model import gated_mlp
from engine.model.experts import SparseMLP
from engine.model.experts import expected_tensors as expected_experts
from engine.model.gated_mlp import GatedMLP
from engine.model.norms import read_norm
from engine.weights.checkpoint import Shape

# T tokens, E hidden_size

_NORMS = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")


@dataclass(frozen=True)
class ExpertsBesideMLP:
    """Dense MLP and experts of one layer."""

    mlp: GatedMLP
    sparse: SparseMLP
    # The weight has the router's scale and 1 / sqrt(E).
    router_norm: RMSNorm
    mlp_norm: RMSNorm
    experts_norm: RMSNorm
    input_norm: RMSNorm
    output_norm: RMSNorm

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, layer: int) -> ExpertsBesideMLP:
        prefix = f"model.layers.{layer}"
        mlp, sparse = GatedMLP.read(reader, config, layer), SparseMLP.read(reader, config, layer)
        assert mlp.output_norm is not None
        scale_E = reader.checkpoint.read(f"{prefix}.mlp.gate.scale").float() * config.hidden_size**-0.5
        mlp_norm, experts_norm, input_norm = (read_norm(reader, config, f"{prefix}.{name}") for name in _NORMS)
        return cls(
            replace(mlp, output_norm=None),
            sparse,
            RMSNorm(scale_E.to(reader.device), config.rms_norm_eps),
            mlp_norm,
            experts_norm,
            input_norm,
            mlp.output_norm,
        )

    def __call__(self, x: Residual, *, norm: RMSNorm | None) -> None:
        x_TE = x.total()
        assert norm is not None
        dense_TE = self.mlp_norm(self.mlp.down(self.mlp.gate_up(x_TE, before=norm), before=self.mlp.activation))
        choices = self.sparse.routing(self.router_norm(x_TE))
        chosen = self.sparse.experts(self.input_norm(x_TE), choices)
        chosen_TE: Tensor = chosen.total() if isinstance(chosen, ExpertSum) else chosen
        x.add(self.output_norm(dense_TE + self.experts_norm(chosen_TE)))

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on the number of tokens, not on the chosen experts."""
        return self.mlp.is_fixed and self.sparse.is_fixed


def expected_tensors(config: ModelConfig, layer: int) -> Mapping[str, Shape]:
    """Return the tensors of the MLP, the router and the experts, with the norms between them."""
    prefix, hidden = f"model.layers.{layer}", (config.hidden_size,)
    norms: dict[str, Shape] = {f"{prefix}.{name}.weight": hidden for name in _NORMS}
    norms[f"{prefix}.mlp.gate.scale"] = hidden
    return norms | {**gated_mlp.expected_tensors(config, layer), **expected_experts(config, layer)}
