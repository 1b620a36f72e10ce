"""Mixture of experts: a router picks a few MLPs for each token (Shazeer et al. 2017, arXiv:1701.06538).

The ranks of a replica share the experts in one of two ways, with equal results:

    SplitExperts    every rank has a share of each expert's features and computes all tokens; outputs are summed
    SpreadExperts   every rank has some whole experts; tokens are exchanged (expert_parallel.py)

A shared expert (used by all tokens) is as wide as several others. On a GPU, where experts are computed at once, it is
cut into that many pieces, which follow the others in the bank and are chosen by every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.shape import Activation, ExpertsConfig, ModelConfig
from engine.kernels.gated_mul import SILU, GatedActivation
from engine.kernels.moe.expert_router import MOST_TOKENS, RoutedTokens, launch_route, new_counters
from engine.kernels.moe.expert_sum import ExpertSum
from engine.kernels.moe.top_k import ChoiceRule, launch_choose_experts, reference_choose_experts
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.expert_bank import Bank, Expert, ExpertList, ExpertSlots
from engine.model.expert_parallel import Experts, SpreadExperts
from engine.model.gated_mlp import GatedMLP, mlp_tensors
from engine.model.gated_mlp import expected_tensors as expected_dense_tensors
from engine.model.norms import read_norm
from engine.runner.parallel import TensorParallel
from engine.weights.checkpoint import Shape, Span, expected_matrices

# T tokens, E hidden_size, I features of the shared expert, C experts per token, X experts to choose from, L logits: X,
# plus one if shared experts are weighed

_TO_LATENT, _FROM_LATENT = "fc1_latent_proj", "fc2_latent_proj"
_NORMS_BESIDE = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")


def read_mlp(reader: ShardReader, config: ModelConfig, layer: int) -> MLP:
    """Read a layer's MLP, with experts or without."""
    if not config.layers[layer].is_sparse:
        return GatedMLP.read(reader, config, layer)
    assert config.experts is not None
    return (ExpertsBesideMLP if config.experts.beside_mlp else SparseMLP).read(reader, config, layer)


@dataclass(frozen=True)
class SparseMLP:
    """Sparse MLP x + (experts(norm(x)) + shared(norm(x))) * scale; the router weighs a few experts for each token."""

    routing: Routing
    experts: Experts
    # None if the shared expert is part of `experts`.
    shared: SharedExpert | None
    residual_scale: float = 1.0
    # Projections of the experts' inputs, and of their sum.
    latents: Latents | None = None

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, layer: int) -> SparseMLP:
        assert config.experts is not None
        assert config.experts.beside_mlp or not config.has_post_norms, "a norm after experts is not computed"
        shape, parallel, block = config.experts, reader.parallel, f"model.layers.{layer}.mlp"
        num_experts, num_features = shape.num_experts, shape.intermediate_size
        features = (0, num_features) if reader.spreads_experts else parallel.span(num_features)
        build_bank = ExpertSlots(lambda index: _read_expert(reader, config, layer, index, features))
        if reader.spreads_experts:
            experts: Experts = SpreadExperts(
                build_bank,
                num_experts,
                parallel,
                redundant=reader.redundant_experts,
                turn=layer,
                weighs_inputs=shape.weighs_inputs,
            )
        else:
            if (num_pieces := pieces_of_shared(reader, shape)) and not shape.weighs_inputs:
                bank = build_bank(range(num_experts + num_pieces))
                if not isinstance(bank, ExpertList):
                    gate_1E = _read_shared_gate(reader, shape, block)
                    routing = Routing.read(
                        reader, shape, f"{block}.gate", num_shared=num_pieces, shared_gate_1E=gate_1E
                    )
                    return cls(routing, SplitExperts(bank, parallel), None, residual_scale=config.residual_scale)
            experts = SplitExperts(build_bank(range(num_experts)), parallel, shape.weighs_inputs)
        shared = None
        if shape.shared_size:
            shared = SharedExpert.read(reader, shape, block, config.activation)
        latents = Latents.read(reader, config, block) if shape.latent_size else None
        routing = Routing.read(reader, shape, f"{block}.gate")
        return cls(routing, experts, shared, config.residual_scale, latents)

    def __call__(self, x: Residual, *, norm: RMSNorm | None) -> None:
        normed_TE = x.normed(norm)
        choices = self.routing(normed_TE)
        compute = self.experts if self.latents is None else partial(self.latents, self.experts)
        x.add(compute(normed_TE, choices), scale=self.residual_scale)
        if self.shared is not None:
            self.shared(normed_TE, x, scale=self.residual_scale)

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on the number of tokens, not on the chosen experts."""
        is_fixed = isinstance(self.experts, SplitExperts) and self.experts.bank.is_fixed
        is_fixed = is_fixed and (self.latents is None or is_plain(self.latents.down, self.latents.up))
        return is_fixed and (self.shared is None or is_plain(self.shared.gate_up, self.shared.down))


@dataclass(frozen=True)
class Latents:
    """Projections into the experts' latent space before the experts, and out of it after them. Every rank has both."""

    down: Linear
    up: Linear

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, block: str) -> Latents:
        assert config.experts is not None
        down = reader.linear({f"{block}.{_TO_LATENT}": (0, config.experts.latent_size)})
        return cls(down, reader.linear({f"{block}.{_FROM_LATENT}": (0, config.hidden_size)}))

    def __call__(self, experts: Experts, x_TE: Tensor, choices: RoutedTokens) -> Tensor:
        """Return the experts' weighted sum, (T, E)."""
        found = experts(self.down(x_TE), choices)
        return self.up(found.total() if isinstance(found, ExpertSum) else found)


@dataclass(frozen=True)
class SharedExpert:
    """MLP of all tokens, split over the ranks by feature; Qwen2-MoE weighs it by sigmoid(gate x)."""

    gate_up: Linear
    down: RowParallelLinear
    gate_1E: Tensor | None
    activation: GatedActivation = SILU

    @classmethod
    def read(cls, reader: ShardReader, config: ExpertsConfig, block: str, activation: Activation) -> SharedExpert:
        name, features = f"{block}.{_shared_name(config)}", reader.parallel.span(config.shared_size)
        return cls(
            reader.linear({f"{name}.{matrix}": features for matrix in activation.input_matrices}),
            reader.row_parallel(f"{name}.down_proj", features),
            _read_shared_gate(reader, config, block),
            GatedActivation.of(activation),
        )

    def __call__(self, normed_TE: Tensor, x: Residual, *, scale: float = 1.0) -> None:
        gate_up_TI = self.gate_up(normed_TE)
        if self.gate_1E is None:
            x.add_product(self.down, gate_up_TI, before=self.activation, scale=scale)
        else:
            gate_T1 = F.linear(normed_TE, self.gate_1E).sigmoid()
            x.add_product(self.down, self.activation(gate_up_TI) * gate_T1, scale=scale)


@dataclass(frozen=True)
class SplitExperts:
    """Implements Experts with every expert's features split over the ranks."""

    bank: Bank
    parallel: TensorParallel
    weighs_inputs: bool = False  # True if the weights multiply the experts' inputs (Llama 4)

    def __call__(self, x_TE: Tensor, choices: RoutedTokens) -> Tensor | ExpertSum:
        weights_TC = choices.weights_TC
        inputs_TC, outputs_TC = (weights_TC, torch.ones_like(weights_TC)) if self.weighs_inputs else (None, weights_TC)
        out_TCE = self.bank(x_TE, choices.chosen_TC, choices.tiles, input_weights_TC=inputs_TC)
        share = ExpertSum(out_TCE, outputs_TC)
        return share if self.parallel.size == 1 else self.parallel.all_reduce(share.total())


@dataclass(frozen=True)
class ExpertsBesideMLP:
    """MLP x + norm(norm_1(dense(norm(x))) + norm_2(experts(norm_3(x)))) of Gemma 4.

    The router sees x / rms(x) * scale / sqrt(E).
    """

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
        mlp_norm, experts_norm, input_norm = (read_norm(reader, config, f"{prefix}.{name}") for name in _NORMS_BESIDE)
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


MLP = GatedMLP | SparseMLP | ExpertsBesideMLP


def expected_tensors(config: ModelConfig, layer: int) -> Mapping[str, Shape]:
    """Return the tensors of one layer's MLP: its router and experts, a dense MLP, or both."""
    shape, hidden, block = config.experts, config.hidden_size, f"model.layers.{layer}.mlp"
    if shape is None or not config.layers[layer].is_sparse:
        return expected_dense_tensors(config, layer)
    tensors: dict[str, Shape] = {}
    if shape.beside_mlp:
        tensors |= expected_dense_tensors(config, layer)
        tensors |= {f"model.layers.{layer}.{name}.weight": (hidden,) for name in _NORMS_BESIDE}
        tensors[f"{block}.gate.scale"] = (hidden,)
    width, inputs, num_experts = shape.latent_size or hidden, config.activation.input_matrices, shape.num_experts
    matrices: dict[str, tuple[Shape, bool]] = {"gate": ((num_experts, hidden), shape.has_router_bias)}
    if shape.latent_size:
        matrices |= {_TO_LATENT: ((width, hidden), False), _FROM_LATENT: ((hidden, width), False)}
    if shape.shared_size:
        shared = _shared_name(shape)
        tensors |= mlp_tensors(f"{block}.{shared}", inputs, hidden, shape.shared_size, has_bias=False)
        if shape.has_shared_gate:
            matrices[f"{shared}_gate"] = ((1, hidden), False)
    for index in range(num_experts):
        name = f"{block}.experts.{index}"
        tensors |= mlp_tensors(name, inputs, width, shape.intermediate_size, has_bias=shape.has_bias)
    if shape.has_correction_bias:
        tensors[f"{block}.gate.e_score_correction_bias"] = (num_experts,)
    if shape.has_expert_scales:
        tensors[f"{block}.gate.per_expert_scale"] = (num_experts,)
    return tensors | expected_matrices(block, matrices)


def _shared_name(config: ExpertsConfig) -> str:
    return "shared_expert" if config.has_shared_gate else "shared_experts"


def pieces_of_shared(reader: ShardReader, config: ExpertsConfig) -> int:
    """Return the number of bank experts that replace the shared one; 0: keep it whole, as calibration needs."""
    if reader.device.type != "cuda" or reader.on_matrix is not None or config.latent_size:
        return 0
    if config.shared_size % config.intermediate_size:
        return 0
    return config.shared_size // config.intermediate_size


def _read_shared_gate(reader: ShardReader, config: ExpertsConfig, block: str) -> Tensor | None:
    return reader.tensor(f"{block}.{_shared_name(config)}_gate.weight") if config.has_shared_gate else None


def _read_expert(reader: ShardReader, config: ModelConfig, layer: int, index: int, features: Span) -> Expert:
    """Read the features [start, end) of an expert. Indices past the last are pieces of the shared expert."""
    assert config.experts is not None
    block, has_bias = f"model.layers.{layer}.mlp", config.experts.has_bias
    name, piece = f"{block}.experts.{index}", index - config.experts.num_experts
    if piece >= 0:
        name, begin = f"{block}.{_shared_name(config.experts)}", piece * config.experts.intermediate_size
        features = begin + features[0], begin + features[1]
    rows = {f"{name}.{matrix}": features for matrix in config.activation.input_matrices}
    gate_up = reader.linear(rows, has_bias=has_bias)
    bias_E = None
    # With shared features the ranks' outputs are summed, so only rank 0 adds the bias.
    if has_bias and (reader.spreads_experts or reader.parallel.is_leader):
        bias_E = reader.tensor(f"{name}.down_proj.bias")
    return Expert(gate_up, reader.columns(f"{name}.down_proj", features), bias_E, GatedActivation.of(config.activation))


@dataclass(frozen=True)
class Routing:
    """Router of one layer: kernels/moe/expert_router.py computes few tokens, kernels/moe/top_k.py many."""

    # In the model's dtype; fp32 on a CPU if logits are exact.
    weight_LE: Tensor
    # fp32
    bias_X: Tensor | None
    counters: Tensor
    # True if logits are computed in fp32 for any model dtype.
    is_exact: bool
    rule: ChoiceRule
    # Added to the logits; of the weight's dtype.
    logit_bias_L: Tensor | None = None
    # fp32: factors of the experts' weights.
    factors_X: Tensor | None = None

    @classmethod
    def read(
        cls,
        reader: ShardReader,
        config: ExpertsConfig,
        name: str,
        *,
        num_shared: int = 0,
        shared_gate_1E: Tensor | None = None,
    ) -> Routing:
        """Read a router.

        name: tensor name without `.weight`. num_shared: pieces of the shared expert, last in the bank. shared_gate:
        gate that weighs them.
        """
        bias_X = reader.checkpoint.read(f"{name}.e_score_correction_bias") if config.has_correction_bias else None
        factors_X = reader.checkpoint.read(f"{name}.per_expert_scale") if config.has_expert_scales else None
        rule = ChoiceRule(
            num_choices=config.num_per_token,
            scores=config.scores,
            num_groups=config.num_groups,
            num_groups_per_token=config.num_groups_per_token,
            normalizes_weights=config.normalizes_weights,
            weight_scale=config.weight_scale,
            num_shared=num_shared,
            weighs_shared=shared_gate_1E is not None,
        )
        weight_LE = reader.tensor(f"{name}.weight")
        if shared_gate_1E is not None:
            weight_LE = torch.cat((weight_LE, shared_gate_1E))
        if config.scores_in_fp32 and not weight_LE.is_cuda:
            weight_LE = weight_LE.float()
        return cls(
            weight_LE,
            None if bias_X is None else bias_X.float().to(reader.device),
            new_counters(reader.device),
            config.scores_in_fp32,
            rule,
            reader.tensor(f"{name}.bias").to(weight_LE.dtype) if config.has_router_bias else None,
            None if factors_X is None else factors_X.float().to(reader.device),
        )

    def __call__(self, x_TE: Tensor) -> RoutedTokens:
        """Return the experts of each token, best first, and their weights."""
        if not can_fuse(x_TE):
            choose = launch_choose_experts if x_TE.is_cuda else reference_choose_experts
            return RoutedTokens(*choose(self._logits(x_TE), self.bias_X, self.rule, self.factors_X))
        return launch_route(
            x_TE,
            self.weight_LE,
            self.bias_X,
            self.counters,
            self.rule,
            is_exact=self.is_exact,
            logit_bias_L=self.logit_bias_L,
            factors_X=self.factors_X,
        )

    def _logits(self, x_TE: Tensor) -> Tensor:
        """Return the logits (T, L), in x's dtype or fp32."""
        if self.is_exact and x_TE.is_cuda and x_TE.dtype != torch.float32:
            # Products of two 16-bit numbers are exact in fp32, which also accumulates them.
            return torch.mm(x_TE, self.weight_LE.T, out_dtype=torch.float32)
        return F.linear(x_TE.to(self.weight_LE.dtype), self.weight_LE, self.logit_bias_L)


def can_fuse(x_TE: Tensor) -> bool:
    """Return True if one kernel computes logits and choice."""
    return x_TE.is_cuda and len(x_TE) <= MOST_TOKENS
