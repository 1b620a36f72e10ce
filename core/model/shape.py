"""Shape of a decoder-only model: the kinds and sizes of its layers. Numbers only; core.model.config reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from core.types.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies; `kind` and the parameters are those of transformers' rope types.

    One kind is ours: "factors" divides each frequency by its own number, as in GGUF files of Llama 3.1 and later.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()  # kind "factors": head_dim / 2 divisors


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Experts of a mixture-of-experts model: gated MLPs, a few of which are active per token."""

    num_experts: int  # per sparse layer
    num_per_token: int
    intermediate_size: int  # of one expert
    normalizes_weights: bool  # whether the weights of a token's experts are normalized to sum 1
    is_sparse: tuple[bool, ...]  # per layer; the others have a dense MLP
    shared_size: int = 0  # features of the shared expert; 0: none
    has_shared_gate: bool = False  # whether the shared expert has a gate per token
    scores: Literal["softmax", "sigmoid"] = "softmax"  # router's activation; sigmoid has a bias for the selection
    num_groups: int = 1  # equal groups of experts
    num_groups_per_token: int = 1  # groups from which a token's experts are selected
    weight_scale: float = 1.0  # factor of the selected experts' weights
    scores_in_fp32: bool = False  # whether the router's matmul is in fp32 for every model dtype


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: keys and values of all heads are projections of one latent per token.

    DeepSeek-V2, arXiv:2405.04434, section 2.1. The cache holds a token's latent and one rotated key.
    """

    latent_dim: int  # kv_lora_rank
    rope_dim: int  # rotated part of queries and keys; its key is shared by all heads
    nope_dim: int  # unrotated part
    value_dim: int
    query_dim: int | None  # q_lora_rank: queries are low-rank projections; None: full-rank
    is_interleaved: bool  # whether rotary pairs are adjacent in the weights instead of half a head apart


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only model. Counts are of the whole model, before tensor parallelism."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # positions that the model was trained for
    max_context: int  # tokens of prompt and output; max_position after rope scaling
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool  # of the attention's output projection
    has_mlp_bias: bool
    has_qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # per layer; a token attends to itself and to window - 1 tokens before it
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None  # implies num_kv_heads == 1 and head_dim == nope_dim + rope_dim
    layer_heads: tuple[tuple[int, int], ...] = ()  # KV heads and head_dim of each layer; empty: all layers are alike
    num_kv_layers: int | None = None  # leading layers with KV of their own, which the others read; None: all

    @property
    def kv_layers(self) -> tuple[tuple[int, int], ...]:
        """KV heads, and numbers per row of the KV cache, of each layer that has KV of its own."""
        layers = self.layer_heads or ((self.num_kv_heads, self.kv_dim),) * self.num_layers
        return layers[: self.num_kv_layers]

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def kv_sides(self) -> int:
        """Rows per token and head in the KV cache: keys and values, or one latent for both."""
        return 1 if self.latent else 2

    @property
    def kv_dim(self) -> int:
        """Numbers per row of the KV cache."""
        return self.latent.latent_dim + self.latent.rope_dim if self.latent else self.head_dim

    @property
    def kv_exact_dim(self) -> int:
        """Trailing numbers of a row that stay bf16 in an 8-bit cache: the rotated key, as in DeepSeek's FP8 cache."""
        return self.latent.rope_dim if self.latent else 0

    def can_keep_kv(self, dtype: str) -> bool:
        """Return True if the KV cache can be of `dtype`: int4 rotates heads, in parts of at least four numbers."""
        return dtype != "int4" or (not self.latent and all(dim % 4 == 0 for _, dim in self.kv_layers))

    def layers_at(self, key: str, indices: Sequence[int]) -> tuple[int, ...]:
        """Return the layers with KV at these indices, ascending; negative ones count from the end. Raises SpecError.

        key: field of the spec.
        """
        count = len(self.kv_layers)
        for index in indices:
            if not -count <= index < count:
                raise SpecError(f"{key}: layer {index} is out of range [-{count}, {count}) of {self.architecture}")
        return tuple(sorted({index % count for index in indices}))

    def check_kv_dtype(self, key: str, dtype: str) -> None:
        """Raise SpecError unless the KV cache, or KV on the wire, can be of `dtype`. key: field of the spec."""
        if not self.can_keep_kv(dtype):
            dims = sorted({dim for _, dim in self.kv_layers if dim % 4})
            form = "stores latents" if self.latent else f"has a head_dim of {dims[0]}, no multiple of 4"
            raise SpecError(f"{key}: {dtype} is not possible, because {self.architecture} {form}; use int8")

    @property
    def attention_scale(self) -> float:
        """Scale of attention scores: 1 / sqrt(head_dim), times DeepSeek's YaRN factor."""
        scale, rope = 1 / math.sqrt(self.head_dim), self.rope_scaling
        if self.latent and rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1:
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
        return scale

    def is_sparse(self, layer: int) -> bool:
        """Return whether the layer has experts instead of a dense MLP."""
        return self.experts is not None and self.experts.is_sparse[layer]

    @property
    def num_parameters(self) -> int:
        layers = self.num_layers * (self._attention_parameters() + 2 * self.hidden_size)
        layers += sum(3 * self.hidden_size * self._mlp_features(layer) for layer in range(self.num_layers))
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return layers + embeddings + self.hidden_size

    def _attention_parameters(self) -> int:
        """Return the number of attention parameters of one layer."""
        if not (latent := self.latent):
            return self.head_dim * (2 * self.num_q_heads + 2 * self.num_kv_heads) * self.hidden_size
        inputs = latent.query_dim or self.hidden_size
        matrices = self.num_q_heads * self.head_dim * inputs
        if latent.query_dim:
            matrices += latent.query_dim * (self.hidden_size + 1)  # with a norm
        matrices += self.kv_dim * self.hidden_size + latent.latent_dim
        matrices += self.num_q_heads * (latent.nope_dim + latent.value_dim) * latent.latent_dim
        return matrices + self.num_q_heads * latent.value_dim * self.hidden_size

    def _mlp_features(self, layer: int) -> int:
        if self.experts is None or not self.experts.is_sparse[layer]:
            return self.intermediate_size
        return self.experts.num_experts * self.experts.intermediate_size + self.experts.shared_size

    def tensor_parallel_choices(self) -> list[int]:
        """Return the possible sizes: query heads divide evenly, and each layer's KV heads divide or are replicated."""
        sizes = (size for size in range(1, self.num_q_heads + 1) if self.num_q_heads % size == 0)
        counts = {num_heads for num_heads, _ in self.kv_layers}
        return [size for size in sizes if all(count % size == 0 or size % count == 0 for count in counts)]

    def check_tensor_parallel(self, size: int) -> None:
        """Raise SpecError with the possible sizes unless `size` is one of them."""
        choices = self.tensor_parallel_choices()
        if size not in choices:
            num_kv_heads = " or ".join(map(str, sorted({num_heads for num_heads, _ in self.kv_layers})))
            raise SpecError(
                f"tensor_parallel: {size} does not fit {self.num_q_heads} query and {num_kv_heads} KV heads; "
                f"choose one of {', '.join(map(str, choices))}"
            )

    def check_expert_parallel(self, size: int, *, redundant: int = 0) -> None:
        """Raise SpecError unless the experts can be spread over `size` ranks with `redundant` copies per layer."""
        if self.experts is None:
            raise SpecError(f"expert_parallel: {self.architecture} has no experts; leave it out")
        if self.experts.num_experts < size:
            raise SpecError(f"expert_parallel: {self.experts.num_experts} experts do not fill {size} ranks")
        if redundant > (most := (size - 1) * self.experts.num_experts):
            raise SpecError(f"redundant_experts: {redundant} are more than the {most} that {size} ranks do not hold")

    def check_deterministic(self) -> None:
        """Raise SpecError unless each row of a step is computed independently of the other rows."""
        if self.experts is not None or self.latent is not None:
            raise SpecError(
                f"engine: deterministic is not supported for {self.architecture}: torch computes experts and latents"
            )
