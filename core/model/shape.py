"""Shape of a decoder-only model: the kinds and sizes of its layers. Numbers only; core.model.config reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from core.model.recurrent import RecurrentShape
from core.types.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; `kind` and the parameters are those of transformers' rope types.

    One kind is ours: "factors" divides each frequency by its own number, as in GGUF files of Llama 3.1 and later.
    """

    dim: int  # rotated features of a head, the first ones
    theta: float = 10000.0
    max_position: int = 0  # positions that the model was trained for
    is_interleaved: bool = False  # whether the features of a pair are adjacent in the weights, not half a head apart
    kind: str = "default"
    factor: float = 1.0
    original_max_position: float = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn, longrope
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()  # kinds "factors" and "longrope": dim / 2 divisors
    long_factors: tuple[float, ...] = ()  # longrope: those of contexts beyond original_max_position
    is_long: bool = False  # longrope: whether long_factors apply
    num_rotated: int | None = None  # kind "proportional": rotated features, of `dim`; None: all


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Factor of queries that grows with their position: 1 + scale log(1 + floor((position + offset) / interval)).

    Llama 4 (offset 1) and Ministral 3 (offset 0).
    """

    scale: float
    interval: int
    offset: int = 0


@dataclass(frozen=True)
class Activation:
    """Activation of an MLP: function(gate) * up. "relu2" has no gate: it is max(up, 0)^2.

    "swigluoai" is that of gpt-oss: gate and up are clamped to `limit`, and the result is
    gate * sigmoid(alpha * gate) * (up + 1).
    """

    kind: Literal["silu", "gelu", "gelu_pytorch_tanh", "swigluoai", "relu2"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def input_matrices(self) -> tuple[str, ...]:
        """Names of the matrices that the MLP multiplies its input with."""
        return ("up_proj",) if self.kind == "relu2" else ("gate_proj", "up_proj")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Experts of a mixture-of-experts model: MLPs, a few active per token."""

    num_experts: int  # per sparse layer
    num_per_token: int
    intermediate_size: int  # of one expert
    normalizes_weights: bool  # whether the weights of a token's experts are normalized to sum 1
    shared_size: int = 0  # features of the shared expert; 0: none
    latent_size: int = 0  # features that the routed experts read and write, after projection; 0: hidden_size
    has_shared_gate: bool = False  # whether the shared expert has a gate per token
    scores: Literal["softmax", "sigmoid"] = "softmax"  # router's activation
    has_correction_bias: bool = False  # whether a bias is added to the scores for the selection only
    num_groups: int = 1  # equal groups of experts
    num_groups_per_token: int = 1  # groups from which a token's experts are selected
    weight_scale: float = 1.0  # factor of the selected experts' weights
    scores_in_fp32: bool = False  # whether the router's matmul is in fp32 for every model dtype
    has_router_bias: bool = False
    has_bias: bool = False  # of the experts' matrices
    weighs_inputs: bool = False  # whether weights multiply the experts' inputs instead of their outputs
    has_expert_scales: bool = False  # whether each expert's weight has a learned factor
    beside_mlp: bool = False  # a dense MLP runs beside the experts, each with separate norms (Gemma 4)


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """Sparse attention: a query attends to the positions that an indexer scores highest.

    DeepSeek-V3.2, arXiv:2512.02556, section 2.1. The cache holds one index key per token, at the end of its latent row.
    """

    num_heads: int
    head_dim: int  # of index queries and keys; the first numbers are rotated
    top_k: int  # positions per query; shorter contexts are attended to as a whole
    is_interleaved: bool  # whether the features of a rotary pair are adjacent


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
    index: IndexConfig | None = None  # None: a query attends to all positions up to its own


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Facts that may differ between the layers of a model."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the dense MLP
    is_sparse: bool = False  # whether the MLP has experts
    rope: int | None = 0  # index in ModelConfig.ropes; None: queries and keys are not rotated
    window: int | None = None  # a token attends to itself and to window - 1 tokens before it
    chunk: int | None = None  # a token attends to its own chunk of positions only; excludes window
    kv_layer: int | None = None  # earlier layer whose keys and values it reads; None: it has its own
    has_qk_norm: bool = True  # in models whose qk_norm is "plain"
    values_are_keys: bool = False  # whether the key projection gives the values, too
    scales_queries: bool = False  # in models with QueryScaling
    has_indexer: bool = False  # in models with IndexConfig; others use the positions of the last layer that has one
    recurrent: RecurrentShape | None = None  # None: the mixer is attention
    has_mixer: bool = True  # attention or a recurrence
    has_mlp: bool = True

    @property
    def has_kv(self) -> bool:
        """True if the layer stores its own keys and values."""
        return self.has_mixer and self.kv_layer is None and self.recurrent is None


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
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...]
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    num_further_layers: int = 0  # layers after the last that predict further tokens (MTP)
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None  # implies num_kv_heads == 1 and head_dim == nope_dim + rope_dim
    activation: Activation = Activation()
    has_qkv_bias: bool = False
    has_output_bias: bool = False  # of the attention's output projection
    has_mlp_bias: bool = False
    # Norms. head: of each query and key head, projection: of all heads together, plain: of each head, without a weight.
    qk_norm: Literal["head", "projection", "plain"] | None = None
    has_value_norm: bool = False  # of each value head, without a weight
    has_pre_norms: bool = True  # before attention and MLP
    # Of the outputs of attention and dense MLP, before the residual addition; names as in Gemma.
    has_post_norms: bool = False
    norms_add_one: bool = False  # whether norms multiply by 1 + weight
    norms_round_late: bool = False  # whether norms multiply by the weight in fp32, before rounding
    # Scores of attention.
    score_scale: float | None = None  # None: 1 / sqrt(head_dim)
    score_soft_cap: float | None = None
    has_sinks: bool = False  # a score per head without a key
    has_attention_gate: bool = False  # the query projection has an output gate after each head
    query_scaling: QueryScaling | None = None
    # Scales of the residual stream.
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and MLP, experts included
    has_layer_scales: bool = False  # a learned factor of each layer's output
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    per_layer_dim: int = 0  # features of layer-specific embeddings (Gemma 4); 0: none
    per_layer_vocab_size: int = 0

    def lengthened(self, max_context: int | None) -> ModelConfig:
        """Return the model for contexts of `max_context` tokens. Only LongRoPE models change.

        LongRoPE has two sets of frequency divisors: up to original_max_position, the default context, and beyond.
        transformers chooses by the length of each prompt, which would make cached keys depend on later tokens. Here all
        sequences of a deployment use the same set, as in vLLM.
        """
        rope = self.ropes[0]
        if rope.kind != "longrope" or not max_context or max_context <= rope.original_max_position:
            return self
        return replace(self, ropes=(replace(rope, is_long=True),), max_context=self.max_position)

    @property
    def kv_layers(self) -> tuple[tuple[int, int], ...]:
        """KV heads, and numbers per row of the KV cache, of each layer that has KV of its own."""
        return tuple((layer.num_kv_heads, self._row_dim(layer)) for layer in self.layers if layer.has_kv)

    @property
    def kv_windows(self) -> tuple[int, ...]:
        """Positions that a query sees, its own included, per layer of `kv_layers`; 0: all. Chunks count as windows.

        For layers that share keys and values, the widest window counts.
        """
        readers: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if not layer.has_mixer or layer.recurrent:
                continue
            readers.setdefault(self.pool_layer(index), []).append(layer.window or layer.chunk or 0)
        return tuple(0 if 0 in readers[place] else max(readers[place]) for place in range(len(self.kv_layers)))

    def _row_dim(self, layer: LayerConfig) -> int:
        if self.latent is None:
            return layer.head_dim
        return self.kv_dim + (self.latent.index.head_dim if self.latent.index and layer.has_indexer else 0)

    def pool_layer(self, index: int) -> int:
        """Return the place in `kv_layers` of the keys and values that a layer reads."""
        source = self.layers[index].kv_layer
        source = index if source is None else source
        return sum(layer.has_kv for layer in self.layers[:source])

    @property
    def recurrent_layers(self) -> tuple[RecurrentShape, ...]:
        """Widths of each recurrent layer."""
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent)

    def state_layer(self, index: int) -> int:
        """Return the place of a layer in `recurrent_layers`."""
        return sum(layer.recurrent is not None for layer in self.layers[:index])

    @property
    def kv_sides(self) -> int:
        """Rows per token and head in the KV cache: keys and values, or one latent for both."""
        return 1 if self.latent else 2

    @property
    def kv_dim(self) -> int:
        """Numbers per row of the KV cache, without an index key."""
        return self.latent.latent_dim + self.latent.rope_dim if self.latent else self.head_dim

    def kv_exact_dim(self, dim: int) -> int:
        """Return how many trailing numbers of a row stay bf16 in an 8-bit cache: the rotated key and the index key.

        dim: numbers per row; see kv_layers. The rotated key is kept as in DeepSeek's FP8 cache.
        """
        return dim - self.latent.latent_dim if self.latent else 0

    def can_keep_kv(self, dtype: str) -> bool:
        """Return True if the KV cache can be of `dtype`. int4 needs heads whose sizes are multiples of 4."""
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

    def attention_scale(self, layer: int) -> float:
        """Return the scale of attention scores: 1 / sqrt(head_dim), times DeepSeek's YaRN factor."""
        scale, rope = self.score_scale or 1 / math.sqrt(self.layers[layer].head_dim), self.ropes[0]
        if self.latent and rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1:
            scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
        return scale

    @property
    def num_parameters(self) -> int:
        hidden = self.hidden_size
        layers = sum(self._attention_parameters(layer) + hidden for layer in self.layers if layer.has_mixer)
        layers += sum(self._mlp_parameters(layer) + hidden for layer in self.layers if layer.has_mlp)
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        own = self.num_layers * self.per_layer_dim
        return layers + embeddings + hidden + own * (self.per_layer_vocab_size + 3 * hidden)

    def _attention_parameters(self, layer: LayerConfig) -> int:
        """Return the number of parameters of one layer's attention or recurrence."""
        if layer.recurrent:
            return layer.recurrent.num_parameters
        if not (latent := self.latent):
            num_sides = 0 if layer.kv_layer is not None else 1 if layer.values_are_keys else 2
            num_heads = (3 if self.has_attention_gate else 2) * self.num_q_heads + num_sides * layer.num_kv_heads
            return layer.head_dim * num_heads * self.hidden_size
        inputs = latent.query_dim or self.hidden_size
        matrices = self.num_q_heads * self.head_dim * inputs
        if latent.query_dim:
            matrices += latent.query_dim * (self.hidden_size + 1)  # with a norm
        matrices += self.kv_dim * self.hidden_size + latent.latent_dim
        matrices += self.num_q_heads * (latent.nope_dim + latent.value_dim) * latent.latent_dim
        if latent.index and layer.has_indexer:
            index, query_dim = latent.index, latent.query_dim or 0
            matrices += index.num_heads * (index.head_dim * query_dim + self.hidden_size)
            matrices += index.head_dim * (self.hidden_size + 2)  # with a norm
        return matrices + self.num_q_heads * latent.value_dim * self.hidden_size

    def _mlp_parameters(self, layer: LayerConfig) -> int:
        hidden, experts, num_matrices = self.hidden_size, self.experts, len(self.activation.input_matrices) + 1
        if experts is None or not layer.is_sparse:
            return num_matrices * hidden * layer.intermediate_size
        beside = hidden * (experts.shared_size + (layer.intermediate_size if experts.beside_mlp else 0))
        routed = experts.num_experts * experts.intermediate_size * (experts.latent_size or hidden)
        return num_matrices * (beside + routed) + 2 * hidden * experts.latent_size

    def tensor_parallel_choices(self) -> list[int]:
        """Return the sizes at which query heads divide evenly, and each layer's KV heads divide or are replicated."""
        sizes = (size for size in range(1, self.num_q_heads + 1) if self.num_q_heads % size == 0)
        counts = {num_heads for num_heads, _ in self.kv_layers}
        return [
            size
            for size in sizes
            if all(count % size == 0 or size % count == 0 for count in counts)
            and all(shape.can_share(size) for shape in self.recurrent_layers)
        ]

    def check_tensor_parallel(self, size: int) -> None:
        """Raise SpecError with the possible sizes unless `size` is one of them."""
        choices = self.tensor_parallel_choices()
        if size not in choices:
            num_kv_heads = " or ".join(map(str, sorted({num_heads for num_heads, _ in self.kv_layers})))
            units = {" and ".join(str(part.num_units) for part in shape.parts) for shape in self.recurrent_layers}
            states = f", and recurrent layers of {' or '.join(sorted(units))} heads or channels" if units else ""
            raise SpecError(
                f"tensor_parallel: {size} does not fit {self.num_q_heads} query and {num_kv_heads} KV heads{states}; "
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

    def check_drafts(self, key: str) -> None:
        """Raise SpecError if this model cannot draft: rejected tokens cannot be removed from a state.

        key: field of the spec.
        """
        if self.recurrent_layers:
            raise SpecError(
                f"{key}: {self.architecture} has states, and can only be drafted for; choose another method or model"
            )

    def check_deterministic(self) -> None:
        """Raise SpecError unless each row of a step is computed independently of the other rows."""
        if self.experts is not None or self.latent is not None or self.recurrent_layers:
            raise SpecError(
                f"engine: deterministic is not supported for {self.architecture}: its experts, latents or states are "
                "not computed row by row"
            )
