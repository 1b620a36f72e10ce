"""Scales of input channels, folded into the preceding norm or matrix (Lin et al. 2023, "AWQ", arXiv:2306.00978).

A fold multiplies an input channel of a matrix by s and divides the channel's producer by s. Exact products stay the
same, but channels with large inputs are rounded more finely. Matrices that read the same channels share s, a power of
their inputs' magnitudes. The search takes the exponent, 0 to 1, with the least error of products.

    input_layernorm           -> q, k and v, or the down projections of latent attention
    v                         -> o; query heads of a group share the scales of their KV head
    post_attention_layernorm  -> gate and up of the MLP, of all experts and of the shared ones, and the router
    up                        -> down
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from core.model.shape import ModelConfig
from engine.quantization.formats import Scheme, round_matrix

Some = TypeVar("Some", list[str], Tensor)
# Scheme of matrices whose largest magnitude is given.
SchemeFor = Callable[[Tensor], Scheme]

# O outputs, I inputs, P channels of the producer, R repetitions of a channel, D head_dim

_POWERS = tuple(step / 10 for step in range(11))
# Limits of the search: matrices per fold, and rows of each.
_MATRICES, _ROWS = 16, 512

_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa")
_MLP_INPUTS = ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3")
_ROUTERS = ("gate", "shared_expert_gate")
_MLP = re.compile(r"(.*\.layers\.\d+)\.(mlp|block_sparse_moe)\..*")


@dataclass(frozen=True)
class Fold:
    """Matrices that read the same channels, and the norm or matrix that produces these."""

    producer: str
    consumers: Sequence[str]
    # Matrices that read the channels and are not quantized.
    exact: Sequence[str] = ()
    # Consecutive heads that repeat each of the producer's heads, and the size of a head.
    repeats: int = 1
    head_dim: int = 1


@dataclass(frozen=True)
class ChannelScales:
    """Scales by tensor name without suffix: factors of a matrix's columns; divisors of a norm or of a matrix's rows."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor with its scales, in fp32; unchanged if it has none."""
        stem, _, last = name.rpartition(".")
        columns_I, rows_O = self.columns.get(stem), self.rows.get(stem)
        if last == "weight" and columns_I is not None:
            tensor = tensor.float() * columns_I
        if rows_O is not None:
            tensor = tensor.float() / (rows_O.unsqueeze(1) if tensor.dim() == 2 else rows_O)
        return tensor

    def gram(self, stem: str, gram_II: Tensor) -> Tensor:
        """Return the Gram matrix of the scaled inputs."""
        columns_I = self.columns.get(stem)
        return gram_II if columns_I is None else gram_II / torch.outer(columns_I, columns_I)


def find_folds(names: Iterable[str], config: ModelConfig) -> list[Fold]:
    """Return the folds of a model. names: tensors without `.weight`.

    Leaves out norms that add 1 to their weight, norms of outputs, and normed values: folds would change results.
    """
    if config.recurrent_layers or config.has_attention_gate or (config.latent and config.latent.index):
        return []  # other matrices read these norms, too
    stems, can_scale_norms = set(names), config.has_pre_norms and not config.norms_add_one
    folds = []
    for stem in sorted(stems):
        owner, _, last = stem.rpartition(".")
        if last == "input_layernorm" and can_scale_norms:
            folds.append(Fold(stem, [s for part in _ATTENTION if (s := f"{owner}.self_attn.{part}") in stems]))
        elif last == "post_attention_layernorm" and can_scale_norms and not config.has_post_norms:
            inside = [s for s in sorted(stems) if (match := _MLP.match(s)) and match[1] == owner]
            readers = [s for s in inside if s.rpartition(".")[2] in _MLP_INPUTS]
            folds.append(Fold(stem, readers, [s for s in inside if s.rpartition(".")[2] in _ROUTERS]))
        elif last == "v_proj" and f"{owner}.o_proj" in stems and not config.has_value_norm:
            repeats = config.num_q_heads // config.num_kv_heads
            folds.append(Fold(stem, [f"{owner}.o_proj"], repeats=repeats, head_dim=config.head_dim))
        elif last in ("up_proj", "w3") and (down := f"{owner}.{'down_proj' if last == 'up_proj' else 'w2'}") in stems:
            folds.append(Fold(stem, [down]))
    return folds


def find_scales(
    folds: Iterable[Fold], read: Callable[[str], Tensor], scheme_for: SchemeFor, grams: Mapping[str, Tensor]
) -> ChannelScales:
    """Search the scales of all folds whose consumers have Gram matrices. read: returns a tensor by its name."""
    scales = ChannelScales()
    for fold in folds:
        known = [stem for stem in fold.consumers if stem in grams]
        if not known:
            continue
        known = _some(known, _MATRICES)
        matrices = [(_some(read(f"{stem}.weight"), _ROWS).float(), grams[stem]) for stem in known]
        candidates = _candidates(fold, [gram_II for _, gram_II in matrices])
        columns_I = min(candidates, key=lambda scales_I: _error(scales_I, matrices, scheme_for))
        rows_P = columns_I.view(-1, fold.repeats, fold.head_dim)[:, 0].flatten()
        producer = read(f"{fold.producer}.weight")
        if producer.dim() == 1:
            # Storing the norm rounds its weights, so compute the scales from the stored ones.
            stored_P = (producer.float() / rows_P).to(producer.dtype).float()
            rows_P = (producer.float() / stored_P).nan_to_num(1.0).where(stored_P != 0, 1.0)
            columns_I = rows_P
        scales.rows[fold.producer] = rows_P
        scales.columns.update(dict.fromkeys((*fold.consumers, *fold.exact), columns_I))
    return scales


def _candidates(fold: Fold, grams: Sequence[Tensor]) -> Iterable[Tensor]:
    """Yield powers of the inputs' magnitudes, (I,) each, the first of them 1."""
    squares_I = torch.stack([gram.diagonal() for gram in grams]).sum(0)
    heads_PRD = squares_I.view(-1, fold.repeats, fold.head_dim)
    magnitudes_I = heads_PRD.mean(1, keepdim=True).expand_as(heads_PRD).flatten().clamp_min(1e-12).sqrt()
    for power in _POWERS:
        scales_I = magnitudes_I**power
        scales_I = scales_I / (scales_I.max() * scales_I.min()).sqrt()
        # Powers of two keep unquantized matrices exact.
        yield scales_I.log2().round().exp2() if fold.exact else scales_I


def _error(scales_I: Tensor, matrices: Sequence[tuple[Tensor, Tensor]], scheme_for: SchemeFor) -> float:
    """Return the squared error of the products of scaled and rounded matrices, over the inputs."""
    total = 0.0
    for weight_OI, gram_II in matrices:
        scaled_OI = weight_OI * scales_I
        coded = round_matrix(scaled_OI, scheme_for(scaled_OI.abs().max()))
        difference_OI = coded.weight() / scales_I - weight_OI
        total += float((difference_OI @ gram_II * difference_OI).sum())
    return total


def _some(items: Some, most: int) -> Some:
    """Return at most `most` of the items, evenly spaced."""
    return items[:: -(-len(items) // most)]
