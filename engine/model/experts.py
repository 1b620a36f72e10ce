"""Mixture of experts: a router picks a few gated MLPs for each token (Shazeer et al. 2017, arXiv:1701.06538).

The ranks of a replica share the experts in one of two ways, with equal results:

    SplitExperts    every rank has a share of each expert's features and computes all tokens; the outputs are summed
    SpreadExperts   every rank has some experts whole; tokens travel to them and back (expert parallelism)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model_shape import ExpertsConfig, ModelConfig
from engine.layers import GatedSiLU, Linear, Matrix, RMSNorm, RowParallelLinear
from engine.model.routing import Routing
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


class Experts(Protocol):
    """All experts of one layer, shared by the ranks of a replica."""

    def __call__(self, x_TE: Tensor, chosen_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """For each token the weighted sum of its chosen experts, (T, E), complete on every rank.

        Every rank gives the same arguments. chosen: int64, in no order; weights: fp32.
        """
        ...


@dataclass(frozen=True)
class SparseMLP:
    """x + experts(norm(x)) + shared(norm(x)), where the router weighs a few experts for each token."""

    routing: Routing
    experts: Experts
    shared: SharedExpert | None

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, layer: int) -> SparseMLP:
        assert config.experts is not None
        block, gate, up, down = _names(config, layer)
        routing = Routing.read(reader, config.experts, f"{block}.gate")

        def expert(index: int, features: tuple[int, int]) -> Expert:
            name = f"{block}.experts.{index}"
            gate_up = reader.linear({f"{name}.{gate}": features, f"{name}.{up}": features})
            return Expert(gate_up, reader.columns(f"{name}.{down}", features))

        parallel, num_features = reader.parallel, config.experts.intermediate_size
        experts: Experts
        if reader.spreads_experts:
            ours = range(*parallel.span(config.experts.num_experts))
            whole = [expert(index, (0, num_features)) for index in ours]
            experts = SpreadExperts(whole, config.experts.num_experts, parallel)
        else:
            features = parallel.span(num_features)
            experts = SplitExperts([expert(i, features) for i in range(config.experts.num_experts)], parallel)
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

    experts: list[Expert]
    parallel: TensorParallel

    def __call__(self, x_TE: Tensor, chosen_TC: Tensor, weights_TC: Tensor) -> Tensor:
        order_N, counts_X = _by_expert(chosen_TC, len(self.experts))
        out_NE = _compute(self.experts, x_TE[order_N // chosen_TC.shape[1]], counts_X.tolist())
        return self.parallel.all_reduce(_combine(out_NE, order_N, weights_TC))


@dataclass(frozen=True)
class SpreadExperts:
    """Whole experts on each rank; see Experts.

    1  each rank takes its share of the tokens          3  experts compute what has come, and send it back
    2  and sends them to the ranks of their experts     4  each rank weighs and sums for its tokens, all get all of it
    """

    experts: list[Expert]  # this rank's: its span of all
    num_experts: int
    parallel: TensorParallel

    def __call__(self, x_TE: Tensor, chosen_TC: Tensor, weights_TC: Tensor) -> Tensor:
        parallel, (first, end) = self.parallel, self.parallel.span(len(x_TE))
        chosen_TC, weights_TC = chosen_TC[first:end], weights_TC[first:end]
        order_N, counts_X = _by_expert(chosen_TC, self.num_experts)
        sent_NE = x_TE[first:end][order_N // chosen_TC.shape[1]]

        bounds = [self.num_experts * rank // parallel.size for rank in range(parallel.size + 1)]
        experts_per_rank = [bounds[rank + 1] - bounds[rank] for rank in range(parallel.size)]
        ours = [len(self.experts)] * parallel.size
        # Who sends how much to each expert of ours: (ranks, our experts).
        arriving = parallel.all_to_all(counts_X, experts_per_rank, ours).view(parallel.size, -1)
        to_each = [int(counts.sum()) for counts in counts_X.split(experts_per_rank)]
        from_each = arriving.sum(dim=1).tolist()
        come_ME = parallel.all_to_all(sent_NE, to_each, from_each)

        # They come in the order (rank, expert); experts want (expert, rank).
        expert_M = torch.arange(len(self.experts), device=x_TE.device).repeat(parallel.size)
        expert_M = expert_M.repeat_interleave(arriving.flatten())
        order_M = expert_M.argsort(stable=True)
        out_ME = torch.empty_like(come_ME)
        out_ME[order_M] = _compute(self.experts, come_ME[order_M], arriving.sum(dim=0).tolist())

        out_NE = parallel.all_to_all(out_ME, from_each, to_each)
        own_TE = _combine(out_NE, order_N, weights_TC)
        return parallel.all_gather(own_TE.T, len(x_TE)).T.contiguous()


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


def _by_expert(chosen_TC: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """All choices in the order of their experts, as places in the flattened `chosen`, and how many each expert has."""
    flat_N = chosen_TC.flatten()
    return flat_N.argsort(stable=True), flat_N.bincount(minlength=num_experts)


def _compute(experts: list[Expert], x_NE: Tensor, counts: list[int]) -> Tensor:
    """Each expert computes its rows, which lie in the experts' order."""
    parts = x_NE.split(counts)
    return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True) if len(part)] or [x_NE])


def _combine(out_NE: Tensor, order_N: Tensor, weights_TC: Tensor) -> Tensor:
    """Weigh and sum each token's experts, in the order in which the router chose them, wherever they were computed."""
    by_token_NE = torch.empty(out_NE.shape, dtype=torch.float32, device=out_NE.device)
    by_token_NE[order_N] = out_NE.float()
    by_token_TCE = by_token_NE.view(*weights_TC.shape, out_NE.shape[-1])
    return (by_token_TCE * weights_TC.unsqueeze(-1)).sum(dim=1).to(out_NE.dtype)
