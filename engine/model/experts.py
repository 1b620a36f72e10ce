"""Mixture of experts: a router picks a few gated MLPs for each token (Shazeer et al. 2017, arXiv:1701.06538).

The ranks of a replica share the experts in one of two ways, with equal results:

    SplitExperts    every rank has a share of each expert's features and computes all tokens; outputs are summed
    SpreadExperts   every rank has some whole experts; tokens are exchanged (expert_parallel.py)

A shared expert (used by all tokens) is as wide as several others. On a GPU, where experts are computed at once, it is
cut into that many pieces, which follow the others in the bank and are chosen by every token; it needs no own kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from core.model.shape import ExpertsConfig, ModelConfig
from engine.kernels.gated_mul import SILU
from engine.kernels.moe.expert_router import RoutedTokens
from engine.kernels.moe.expert_sum import ExpertSum
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.expert_bank import Bank, Expert, ExpertList, ExpertSlots
from engine.model.expert_parallel import Experts, SpreadExperts
from engine.model.routing import Routing
from engine.runner.parallel import TensorParallel
from engine.weights.checkpoint import Shape, Span

# T tokens, E hidden_size, I features of the shared expert, C experts per token

# Names of the block and of an expert's gate, up and down matrices.
_NAMES = {"MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2")}
_USUAL_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class SparseMLP:
    """Sparse MLP x + experts(norm(x)) + shared(norm(x)); the router weighs a few experts for each token."""

    routing: Routing
    experts: Experts
    # None if the shared expert is part of `experts`.
    shared: SharedExpert | None

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, layer: int) -> SparseMLP:
        assert config.experts is not None
        shape, parallel, block = config.experts, reader.parallel, _names(config, layer)[0]
        num_experts, num_features = shape.num_experts, shape.intermediate_size
        features = (0, num_features) if reader.spreads_experts else parallel.span(num_features)
        build_bank = ExpertSlots(lambda index: _read_expert(reader, config, layer, index, features))
        if reader.spreads_experts:
            experts: Experts = SpreadExperts(
                build_bank, num_experts, parallel, redundant=reader.redundant_experts, turn=layer
            )
        else:
            if num_pieces := pieces_of_shared(reader, shape):
                bank = build_bank(range(num_experts + num_pieces))
                if not isinstance(bank, ExpertList):
                    gate_1E = _read_shared_gate(reader, shape, block)
                    routing = Routing.read(
                        reader, shape, f"{block}.gate", num_shared=num_pieces, shared_gate_1E=gate_1E
                    )
                    return cls(routing, SplitExperts(bank, parallel), None)
            experts = SplitExperts(build_bank(range(num_experts)), parallel)
        shared = SharedExpert.read(reader, shape, block) if shape.shared_size else None
        return cls(Routing.read(reader, shape, f"{block}.gate"), experts, shared)

    def __call__(self, x: Residual, *, norm: RMSNorm) -> None:
        normed_TE = x.normed(norm)
        x.add(self.experts(normed_TE, self.routing(normed_TE)))
        if self.shared is not None:
            self.shared(normed_TE, x)

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on the number of tokens, not on the chosen experts."""
        is_fixed = isinstance(self.experts, SplitExperts) and self.experts.bank.is_fixed
        return is_fixed and (self.shared is None or is_plain(self.shared.gate_up, self.shared.down))


@dataclass(frozen=True)
class SharedExpert:
    """Gated MLP of all tokens, split over the ranks by feature; Qwen2-MoE weighs it by sigmoid(gate x)."""

    gate_up: Linear
    down: RowParallelLinear
    gate_1E: Tensor | None

    @classmethod
    def read(cls, reader: ShardReader, config: ExpertsConfig, block: str) -> SharedExpert:
        name, features = f"{block}.{_shared_name(config)}", reader.parallel.span(config.shared_size)
        return cls(
            reader.linear({f"{name}.gate_proj": features, f"{name}.up_proj": features}),
            reader.row_parallel(f"{name}.down_proj", features),
            _read_shared_gate(reader, config, block),
        )

    def __call__(self, normed_TE: Tensor, x: Residual) -> None:
        gate_up_TI = self.gate_up(normed_TE)
        if self.gate_1E is None:
            x.add_product(self.down, gate_up_TI, before=SILU)
        else:
            x.add_product(self.down, SILU(gate_up_TI) * F.linear(normed_TE, self.gate_1E).sigmoid())


@dataclass(frozen=True)
class SplitExperts:
    """Implements Experts with every expert's features split over the ranks."""

    bank: Bank
    parallel: TensorParallel

    def __call__(self, x_TE: Tensor, choices: RoutedTokens) -> Tensor | ExpertSum:
        share = ExpertSum(self.bank(x_TE, choices.chosen_TC, choices.tiles), choices.weights_TC)
        return share if self.parallel.size == 1 else self.parallel.all_reduce(share.total())


def expected_tensors(config: ModelConfig, layer: int) -> Mapping[str, Shape]:
    """Return the tensors of one layer's router and experts."""
    assert config.experts is not None
    hidden, features = config.hidden_size, config.experts.intermediate_size
    block, gate, up, down = _names(config, layer)
    tensors: dict[str, Shape] = {f"{block}.gate.weight": (config.experts.num_experts, hidden)}
    for index in range(config.experts.num_experts):
        for name, shape in ((gate, (features, hidden)), (up, (features, hidden)), (down, (hidden, features))):
            tensors[f"{block}.experts.{index}.{name}.weight"] = shape
    if config.experts.scores == "sigmoid":
        tensors[f"{block}.gate.e_score_correction_bias"] = (config.experts.num_experts,)
    if width := config.experts.shared_size:
        shared = f"{block}.{_shared_name(config.experts)}"
        for name, shape in ((gate, (width, hidden)), (up, (width, hidden)), (down, (hidden, width))):
            tensors[f"{shared}.{name}.weight"] = shape
        if config.experts.has_shared_gate:
            tensors[f"{shared}_gate.weight"] = (1, hidden)
    return tensors


def _shared_name(config: ExpertsConfig) -> str:
    return "shared_expert" if config.has_shared_gate else "shared_experts"


def _names(config: ModelConfig, layer: int) -> tuple[str, ...]:
    block, *matrices = _NAMES.get(config.architecture, _USUAL_NAMES)
    return (f"model.layers.{layer}.{block}", *matrices)


def pieces_of_shared(reader: ShardReader, config: ExpertsConfig) -> int:
    """Return the number of bank experts that replace the shared one; 0: keep it whole, as calibration needs."""
    if reader.device.type != "cuda" or reader.on_matrix is not None or config.shared_size % config.intermediate_size:
        return 0
    return config.shared_size // config.intermediate_size


def _read_shared_gate(reader: ShardReader, config: ExpertsConfig, block: str) -> Tensor | None:
    return reader.tensor(f"{block}.{_shared_name(config)}_gate.weight") if config.has_shared_gate else None


def _read_expert(reader: ShardReader, config: ModelConfig, layer: int, index: int, features: Span) -> Expert:
    """Read the features [start, end) of an expert. Indices past the last are pieces of the shared expert."""
    assert config.experts is not None
    block, gate, up, down = _names(config, layer)
    name, piece = f"{block}.experts.{index}", index - config.experts.num_experts
    if piece >= 0:
        name, begin = f"{block}.{_shared_name(config.experts)}", piece * config.experts.intermediate_size
        features = begin + features[0], begin + features[1]
    gate_up = reader.linear({f"{name}.{gate}": features, f"{name}.{up}": features})
    return Expert(gate_up, reader.columns(f"{name}.{down}", features))
