"""Mixture of experts: a router picks a few gated MLPs for each token (Shazeer et al. 2017, arXiv:1701.06538).

The ranks of a replica share the experts in one of two ways, with equal results:

    SplitExperts    every rank has a share of each expert's features and computes all tokens; the outputs are summed
    SpreadExperts   every rank has some experts whole; tokens travel to them and back (spread_experts.py)

What a rank holds, it computes in one of two ways: expert by expert, or on a GPU all at once (kernels/fused_experts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model_shape import ExpertsConfig, ModelConfig
from engine.kernels.fused_experts import fused_experts
from engine.layers import GatedSiLU, Linear, Matrix, RMSNorm, RowParallelLinear, TorchMatrix
from engine.model.routing import Routing
from engine.model.spread_experts import Bank, Experts, SpreadExperts, weigh
from engine.parallel import TensorParallel
from engine.shards import ShardReader
from engine.weights import Shape

# T tokens, E hidden_size, I features of one expert, X experts, C experts chosen for each token, N = choices of tokens

_NAMES = {"MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2")}  # of the block, an expert's gate, up and down
_USUAL_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Expert:
    """One gated MLP, or a rank's share of its features."""

    gate_up: Linear  # rows: gate, up
    down: Matrix

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self.down.multiply(self.gate_up(x_TE), before=GatedSiLU())


@dataclass(frozen=True)
class ExpertList:
    """Expert by expert, whatever form their matrices have."""

    experts: list[Expert]

    def __call__(self, x_TE: Tensor, chosen_TC: Tensor) -> Tensor:
        flat_N = chosen_TC.flatten()
        order_N, counts_X = flat_N.argsort(stable=True), flat_N.bincount(minlength=len(self.experts))
        parts = x_TE[order_N // chosen_TC.shape[1]].split(counts_X.tolist())
        out_NE = x_TE.new_empty(len(flat_N), x_TE.shape[1])
        computed = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        if computed:
            out_NE[order_N] = torch.cat(computed)
        return out_NE.view(*chosen_TC.shape, x_TE.shape[1])


@dataclass(frozen=True)
class ExpertStack:
    """All at once, of matrices that lie in one tensor."""

    gate_up_X2IE: Tensor
    down_XEI: Tensor

    def __call__(self, x_TE: Tensor, chosen_TC: Tensor) -> Tensor:
        return fused_experts(x_TE, self.gate_up_X2IE, self.down_XEI, chosen_TC)


@dataclass(frozen=True)
class SparseMLP:
    """x + experts(norm(x)) + shared(norm(x)), where the router weighs a few experts for each token."""

    routing: Routing
    experts: Experts
    shared: SharedExpert | None

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, layer: int) -> SparseMLP:
        assert config.experts is not None
        block = _names(config, layer)[0]
        routing = Routing.read(reader, config.experts, f"{block}.gate")

        parallel, num_experts = reader.parallel, config.experts.num_experts
        experts: Experts
        if reader.spreads_experts:
            whole = 0, config.experts.intermediate_size
            experts = SpreadExperts(
                lambda ours: _read_bank(reader, config, layer, ours, whole),
                num_experts,
                parallel,
                redundant=reader.redundant_experts,
                turn=layer,
            )
        else:
            features = parallel.span(config.experts.intermediate_size)
            experts = SplitExperts(_read_bank(reader, config, layer, range(num_experts), features), parallel)
        shared = SharedExpert.read(reader, config.experts, block) if config.experts.shared_size else None
        return cls(routing, experts, shared)

    def __call__(self, x_TE: Tensor, *, norm: RMSNorm) -> Tensor:
        normed_TE = norm(x_TE)
        out_TE = x_TE + self.experts(normed_TE, *self.routing(normed_TE))
        return out_TE if self.shared is None else self.shared(normed_TE, residual_TE=out_TE)


@dataclass(frozen=True)
class SharedExpert:
    """A gated MLP for every token, whose features all ranks share; Qwen2-MoE weighs it by sigmoid(gate x)."""

    gate_up: Linear
    down: RowParallelLinear
    gate_1E: Tensor | None

    @classmethod
    def read(cls, reader: ShardReader, config: ExpertsConfig, block: str) -> SharedExpert:
        name, features = f"{block}.{_shared_name(config)}", reader.parallel.span(config.shared_size)
        return cls(
            reader.linear({f"{name}.gate_proj": features, f"{name}.up_proj": features}),
            reader.row_parallel(f"{name}.down_proj", features),
            reader.tensor(f"{name}_gate.weight") if config.has_shared_gate else None,
        )

    def __call__(self, x_TE: Tensor, *, residual_TE: Tensor) -> Tensor:
        gate_up_TI = self.gate_up(x_TE)
        if self.gate_1E is None:
            return self.down(gate_up_TI, before=GatedSiLU(), residual_TO=residual_TE)
        features_TI = GatedSiLU()(gate_up_TI) * F.linear(x_TE, self.gate_1E).sigmoid()
        return self.down(features_TI, residual_TO=residual_TE)


@dataclass(frozen=True)
class SplitExperts:
    """Each expert's features are shared out; see Experts."""

    bank: Bank
    parallel: TensorParallel

    def __call__(self, x_TE: Tensor, chosen_TC: Tensor, weights_TC: Tensor) -> Tensor:
        return self.parallel.all_reduce(weigh(self.bank(x_TE, chosen_TC), weights_TC))


def expected_tensors(config: ModelConfig, layer: int) -> Mapping[str, Shape]:
    """The router and every expert of one layer."""
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


def _read_bank(
    reader: ShardReader, config: ModelConfig, layer: int, experts: Iterable[int], features: tuple[int, int]
) -> Bank:
    """Of some experts of a layer, the features [start, end) of each."""
    block, gate, up, down = _names(config, layer)
    names = [f"{block}.experts.{index}" for index in experts]
    read = [
        Expert(
            reader.linear({f"{name}.{gate}": features, f"{name}.{up}": features}),
            reader.columns(f"{name}.{down}", features),
        )
        for name in names
    ]
    gate_up, down_matrices = [expert.gate_up.matrix for expert in read], [expert.down for expert in read]
    if reader.device.type != "cuda" or not all(isinstance(m, TorchMatrix) for m in (*gate_up, *down_matrices)):
        return ExpertList(read)
    return ExpertStack(_stack(gate_up), _stack(down_matrices))


def _stack(matrices: list[Matrix]) -> Tensor:
    return torch.stack([matrix.weight_OI for matrix in matrices if isinstance(matrix, TorchMatrix)])
