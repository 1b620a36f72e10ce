"""Calibration of the bases of int4 keys and values (engine/kv/basis.py) over a text.

The error of a stored row x is spread evenly over its numbers and grows with their range. In a basis B it adds to the
layer's output, for all readers r of the row, about

    sum over r of  weight(r, x)  range(rotate(x B))^2  |r inverse(B)^T|^2

Readers of keys are queries. An error of the score of key s changes the output by p (v - output), p being the attention
that s gets and v its value, so the weight is the squared norm of that, after the output projection. Readers of values
are the rows of the output projection, weighted by p^2.

If norms replace ranges and weights depend on rows only, the sum is least where B diagonalizes the covariances of rows
and readers and scales each direction by the fourth root of their ratio. Gradient descent continues from there. The zero
point of a row stores a multiple of its first number exactly (rotated, it is the constant vector): the first basis puts
the rows' mean there, which is 60 % of the energy of SmolLM2's keys. Unlike a subtracted mean, this also suits rows far
from the mean, soft caps and sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from core.model import config as model_config
from engine.attention.heads import Heads
from engine.attention.layer_attention import LayerAttention
from engine.kernels.quant.hadamard import rotate
from engine.kv.pool import KVPool
from engine.quantization.calibration import batch_of, open_in_fp32, prompts_of_text
from engine.weights.open_checkpoint import open_model

# T tokens of a prompt, H query heads, K kv heads, G = H / K, D head_dim, E hidden size, R readers of a row

# Tokens per prompt, and of all prompts.
_PROMPT, _TOKENS = 512, 8192
# Least eigenvalue, relative to the largest: bounds the condition number of a basis.
_LEAST = 1e-4
# Steps of gradient descent, each over one prompt, and the size of the first.
_STEPS, _RATE = 300, 0.02


def bases_of_text(model_dir: Path, text: str, say: Callable[[str], None] = lambda line: None) -> dict[str, Tensor]:
    """Return `bases_of` over the first tokens of a text. Raises SpecError if the text is too short."""
    return bases_of(model_dir, prompts_of_text(model_dir, text, length=_PROMPT, num_tokens=_TOKENS), say)


def bases_of(
    model_dir: Path,
    prompts: Sequence[Sequence[int]],
    say: Callable[[str], None] = lambda line: None,
    *,
    num_steps: int = _STEPS,
) -> dict[str, Tensor]:
    """Return the matrices for `write_bases`, in bf16. say: receives lines of progress. num_steps: of gradient descent.

    Runs on the CPU in fp32. Raises SpecError for latent attention.
    """
    config = model_config.load(model_dir)
    config.check_kv_dtype("calibration", "int4")
    checkpoint = open_model(model_dir, config)
    found: dict[int, _SeenLayer] = {}
    with torch.no_grad():
        model, pool = open_in_fp32(model_dir, config, checkpoint, prompts)
        for number, prompt in enumerate(prompts, 1):
            observed = partial(_Observer, pool=pool, num_tokens=len(prompt), found=found)
            model(batch_of(prompt, pool), pool, None, others=observed)
            say(f"prompt {number} of {len(prompts)} computed")
        readers = (index for index, layer in enumerate(config.layers) if layer.has_mixer and not layer.recurrent)
        for index in readers:
            weight_EI = checkpoint.read(f"model.layers.{index}.self_attn.o_proj.weight")
            found[config.pool_layer(index)].add_output(weight_EI)
    bases: dict[str, Tensor] = {}
    for number, (layer, seen) in enumerate(sorted(found.items()), 1):
        bases |= {f"{layer}.{side}": matrix_KDD for side, matrix_KDD in seen.bases(num_steps).items()}
        say(f"layer {number} of {len(found)} calibrated")
    return bases


@dataclass
class _Observer:
    """Attention backend (engine.attention.heads.Heads) that records one prompt's queries, keys and values per layer."""

    heads: Heads
    pool: KVPool
    num_tokens: int
    found: dict[int, _SeenLayer]

    def store(self, attention: LayerAttention, heads_TND: Tensor) -> Tensor:
        q_THD, layer = self.heads.store(attention, heads_TND), attention.layer
        blocks_B = torch.arange(-(-self.num_tokens // self.pool.layout.block_size))
        k_KTD, v_KTD = self.pool.read(layer, blocks_B, torch.float32)[:, :, : self.num_tokens]
        q_KGTD = torch.unflatten(q_THD * attention.scale, 1, (len(k_KTD), -1)).movedim(0, 2)
        self.found.setdefault(layer, _SeenLayer()).prompts.append((q_KGTD, k_KTD, v_KTD))
        return q_THD

    def attend(self, attention: LayerAttention, q_THD: Tensor) -> Tensor:
        return self.heads.attend(attention, q_THD)


@dataclass
class _SeenLayer:
    """Scaled queries, keys and values of one layer of the pool, for each prompt and each layer that reads it."""

    prompts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    # Sum of W^T W of the output projections.
    outputs_KGDD: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add_output(self, weight_EI: Tensor) -> None:
        num_heads, _, dim = self.prompts[0][1].shape
        weight_KGED = torch.unflatten(weight_EI.float(), 1, (num_heads, -1, dim)).permute(1, 2, 0, 3)
        self.outputs_KGDD = self.outputs_KGDD + weight_KGED.mT @ weight_KGED

    def bases(self, num_steps: int) -> dict[str, Tensor]:
        heads = range(len(self.prompts[0][1]))
        of_heads = ([_refined(_first_basis(seen), seen, num_steps) for seen in self._seen(head)] for head in heads)
        sides = zip(*of_heads, strict=True)
        return {side: torch.stack(matrices) for side, matrices in zip(("keys", "values"), sides, strict=True)}

    def _seen(self, head: int) -> tuple[list[_Seen], list[_Seen]]:
        """Return a head's keys and its values with their readers. Attention ignores windows, soft caps and sinks."""
        keys, values = [], []
        metric_GDD = self.outputs_KGDD[head]
        sizes_GD, vectors_GDD = torch.linalg.eigh(metric_GDD)
        rows_RD = (vectors_GDD * sizes_GD.clamp_min(0).sqrt().unsqueeze(1)).mT.flatten(0, 1)
        for q_KGTD, k_KTD, v_KTD in self.prompts:
            q_GTD, k_TD, v_TD = q_KGTD[head], k_KTD[head], v_KTD[head]
            hidden_TT = torch.full((len(k_TD),) * 2, -torch.inf).triu_(1)
            p_GTT = torch.softmax(q_GTD @ k_TD.mT + hidden_TT, -1)
            out_GTD = p_GTT @ v_TD
            v_GTD = v_TD @ metric_GDD
            # |W (v - output)|^2
            moved_GTT = (v_GTD * v_TD).sum(-1).unsqueeze(1) - 2 * out_GTD @ v_GTD.mT
            moved_GTT += (out_GTD @ metric_GDD * out_GTD).sum(-1, keepdim=True)
            p_GTT.square_()
            values.append(_Seen(v_TD, rows_RD, p_GTT.sum(1).repeat_interleave(v_TD.shape[1], 0)))
            keys.append(_Seen(k_TD, q_GTD.flatten(0, 1), moved_GTT.clamp_min_(0).mul_(p_GTT).flatten(0, 1)))
        return keys, values


@dataclass(frozen=True)
class _Seen:
    """Rows of one head in one prompt, and their readers."""

    rows_TD: Tensor
    readers_RD: Tensor
    weights_RT: Tensor


def _first_basis(seen: Sequence[_Seen]) -> Tensor:
    """Return `_basis` of the rows. Rows count by the root of their weight, so that the many light rows still count."""
    rows_ND = torch.cat([one.rows_TD for one in seen]).double()
    readers_ND = torch.cat([one.readers_RD for one in seen]).double()
    weights_N1 = torch.cat([one.weights_RT.sum(0).sqrt() for one in seen]).double().unsqueeze(1)
    weights_N1 /= weights_N1.sum().clamp_min(1e-30)
    mean_D = (weights_N1 * rows_ND).sum(0)
    rows_ND -= mean_D
    return _basis((weights_N1 * rows_ND).mT @ rows_ND, readers_ND.mT @ readers_ND, mean_D)


def _basis(rows_DD: Tensor, metric_DD: Tensor, mean_D: Tensor) -> Tensor:
    """Return the change of basis (D, D) for rows with the covariance `rows`: row @ basis.

    metric: covariance of the readers. mean: vector that becomes a multiple of the first unit vector.
    """
    values_D, vectors_DD = torch.linalg.eigh(metric_DD)
    root_DD = vectors_DD * _floored(values_D).sqrt() @ vectors_DD.mT
    values_D, vectors_DD = torch.linalg.eigh(root_DD @ rows_DD @ root_DD)
    basis_DD: Tensor = (root_DD @ vectors_DD * _floored(values_D) ** -0.25).flip(1)
    basis_DD /= basis_DD.square().mean().sqrt()
    return basis_DD @ _reflection(mean_D @ basis_DD)


def _reflection(x_D: Tensor) -> Tensor:
    """Return the Householder reflection that makes x a multiple of the first unit vector."""
    normal_D = x_D / x_D.norm().clamp_min(1e-30)
    normal_D[0] += 1 if normal_D[0] > 0 else -1
    reflection_DD: Tensor = torch.eye(len(x_D), dtype=x_D.dtype) - 2 * normal_D.outer(normal_D) / normal_D.dot(normal_D)
    return reflection_DD


def _floored(values_D: Tensor) -> Tensor:
    return values_D.clamp_min(_LEAST * float(values_D.max())).clamp_min(1e-30)


def _refined(basis_DD: Tensor, seen: Sequence[_Seen], num_steps: int = _STEPS) -> Tensor:
    """Return a basis near `basis` in which errors add less to the output, in bf16."""
    basis_DD = basis_DD.float()
    rows = [one.rows_TD @ basis_DD for one in seen]
    readers = [one.readers_RD @ torch.linalg.inv(basis_DD).mT for one in seen]
    change_DD = torch.eye(len(basis_DD), requires_grad=True)
    optimizer = torch.optim.Adam([change_DD], betas=(0.9, 0.99))
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = _RATE * (1 - step / num_steps)
        number = step % len(seen)
        y_TD = rotate(rows[number] @ change_DD)
        read_R = (readers[number] @ torch.linalg.inv(change_DD).mT).square().sum(1)
        loss = read_R @ seen[number].weights_RT @ (y_TD.amax(1) - y_TD.amin(1)).square()
        optimizer.zero_grad()
        loss.clamp_min(1e-30).log().backward()
        optimizer.step()
    return (basis_DD @ change_DD.detach()).to(torch.bfloat16)
