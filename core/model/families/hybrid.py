"""Recurrent layers beside attention: Granite 4, Nemotron-H and 3, LFM2, Qwen3-Next and Qwen3.5; and Granite MoE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

from core.model.families.deepseek import with_experts
from core.model.families.experts import with_qwen_experts
from core.model.families.family import (
    FULL,
    LINEAR,
    Family,
    Fields,
    Stored,
    common,
    layer_kinds,
    stacked_experts,
    with_experts_everywhere,
    with_layers,
    with_rope,
)
from core.model.families.granite import granite
from core.model.recurrent import DeltaNetShape, MambaShape, RecurrentShape, ShortConvShape
from core.model.settings import Settings
from core.model.shape import Activation
from core.types.errors import SpecError

_CONV, _EXPERTS = "conv", "moe"
_NEMOTRON_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": _EXPERTS}
_GRANITE_EXPERTS = (
    Stored(r"block_sparse_moe\.router\.layer", "mlp.gate"),
    *stacked_experts("block_sparse_moe", names=("input_linear", "output_linear")),
)
_GRANITE_SHARED_IN, _GRANITE_SHARED_OUT = r"shared_mlp\.input_linear", r"shared_mlp\.output_linear"
_GATE_UP = ("gate_proj", "up_proj")


def _with_recurrence(fields: Fields, kinds: Sequence[str], kind: str, shape: RecurrentShape) -> Fields:
    """Replace attention by a recurrence in the layers of one kind. kinds: kind of each layer."""
    return with_layers(fields, recurrent=[shape if own == kind else None for own in kinds])


def _granite_moe(settings: Settings) -> Fields:
    return with_experts_everywhere(settings, granite(settings))


def _granite_hybrid(settings: Settings) -> Fields:
    """Read Granite 4: Mamba-2 instead of attention in most layers; a dense MLP, or experts and a shared expert."""
    shared = settings.count("shared_intermediate_size")
    settings.choice("hidden_act", ("silu", "swish"), "silu")  # of the recurrence, too
    has_experts = settings.count("num_local_experts", least=0) > 0
    # Without experts, the shared one is the MLP.
    fields = granite(settings if has_experts else settings.replaced(intermediate_size=shared))
    key = "layer_types" if "layer_types" in settings else "layers_block_type"
    num_layers = fields["num_layers"]
    kinds = layer_kinds(settings, num_layers, lambda index: LINEAR, (FULL, LINEAR), key=key)
    is_rotated = settings.get("position_embedding_type") == "rope"
    num_heads, width = settings.count("mamba_n_heads"), settings.count("mamba_expand") * fields["hidden_size"]
    mamba = _mamba(
        settings,
        fields,
        num_heads=num_heads,
        head_dim=width // num_heads if settings.get("mamba_d_head") == "auto" else settings.count("mamba_d_head"),
        num_groups=settings.count("mamba_n_groups"),
        state_dim=settings.count("mamba_d_state"),
        conv_width=settings.count("mamba_d_conv", least=2),
        has_conv_bias=settings.switch("mamba_conv_bias", True),
        has_bias=settings.switch("mamba_proj_bias"),
    )
    fields = with_layers(fields, rope=[0 if is_rotated else None] * num_layers)
    fields = _with_recurrence(fields, kinds, LINEAR, mamba)
    return with_experts_everywhere(settings, fields, shared_size=shared) if has_experts else fields


def _nemotron_h(settings: Settings) -> Fields:
    """Read Nemotron-H and Nemotron 3: layers of one part each, which is Mamba-2, attention, an MLP or experts."""
    key = "layers_block_type" if "layers_block_type" in settings else "layer_types"
    kinds = _nemotron_kinds(settings, key, "hybrid_override_pattern")
    settings.choice("mlp_hidden_act", ("relu2",), "relu2")
    settings.choice("mamba_hidden_act", ("silu",), "silu")
    settings = settings.replaced(num_hidden_layers=len(kinds), rms_norm_eps=settings.real("layer_norm_epsilon"))
    # The general bias settings do not apply to attention here.
    fields = with_rope(settings, common(settings)) | {"has_qkv_bias": False, "has_output_bias": False}
    fields |= {"norms_round_late": True, "activation": Activation("relu2")}
    mamba = _mamba(
        settings,
        fields,
        num_heads=settings.count("mamba_num_heads"),
        head_dim=settings.count("mamba_head_dim"),
        num_groups=settings.count("n_groups"),
        state_dim=settings.count("ssm_state_size"),
        conv_width=settings.count("conv_kernel", least=2),
        has_conv_bias=settings.switch("use_conv_bias", True),
        has_bias=settings.switch("use_bias"),
    )
    has_mixer = [kind in (LINEAR, FULL) for kind in kinds]
    fields = with_layers(fields, rope=[None] * len(kinds), has_mixer=has_mixer, has_mlp=[not has for has in has_mixer])
    return _with_nemotron_experts(settings, _with_recurrence(fields, kinds, LINEAR, mamba), kinds)


def _nemotron_kinds(settings: Settings, key: str, pattern_key: str) -> list[str]:
    """Return the kind of each layer, from a list or a pattern. Raises SpecError."""
    pattern, letters = settings.get(pattern_key), _NEMOTRON_LETTERS
    if key not in settings and isinstance(pattern, str) and pattern and set(pattern) <= letters.keys():
        return [letters[letter] for letter in pattern]
    if not isinstance(listed := settings.get(key), list):
        raise SpecError(
            f"{key} is {listed!r:.60} and {pattern_key} {pattern!r:.60}; one must give the kind of each layer, as a "
            f"list or in letters of {''.join(letters)}"
        )
    return layer_kinds(settings, len(listed), lambda index: "mlp", tuple(letters.values()), key=key)


def _with_nemotron_experts(settings: Settings, fields: Fields, kinds: list[str]) -> Fields:
    settings = settings.replaced(mlp_layer_types=["sparse" if kind == _EXPERTS else "dense" for kind in kinds])
    shared = settings.count("moe_shared_expert_intermediate_size")
    latent = settings.count("moe_latent_size", 0, least=0)
    fields = with_experts(settings, fields, scores="sigmoid", normalizes=settings.switch("norm_topk_prob", True))
    if experts := fields.get("experts"):
        if fields["has_mlp_bias"]:
            raise SpecError("mlp_bias true is not supported beside experts")
        fields["experts"] = replace(experts, shared_size=shared, latent_size=latent)
    if fields["num_further_layers"]:
        predictor = _nemotron_kinds(settings, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
        fields["num_further_layers"] *= experts is not None and predictor == [FULL, _EXPERTS]
    return fields


def _mamba(settings: Settings, fields: Fields, **sizes: Any) -> MambaShape:
    # Nemotron's own code uses these limits, too; transformers 5.23 uses time_step_min instead.
    min_dt, max_dt = settings.limits("time_step_limit", (0.0, inf))
    hidden_size, norm_eps = fields["hidden_size"], fields["rms_norm_eps"]
    return MambaShape(hidden_size=hidden_size, norm_eps=norm_eps, min_dt=min_dt, max_dt=max_dt, **sizes)


def _lfm2(settings: Settings) -> Fields:
    """Read LFM2: gated short convolutions in most layers, attention in the others."""
    norm_eps = settings.real("norm_eps", 1e-5)
    size = settings.count("block_ff_dim") if "block_ff_dim" in settings else settings.count("intermediate_size")
    if settings.switch("block_auto_adjust_ff_dim", True):
        multiple = settings.count("block_multiple_of", 256)
        size = int(settings.real("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        size = -(-size // multiple) * multiple
    tied = settings.switch("tie_embedding", settings.switch("tie_word_embeddings", True))
    settings = settings.replaced(
        intermediate_size=size, rms_norm_eps=norm_eps, tie_word_embeddings=tied, hidden_act="silu"
    )
    fields = with_rope(settings, common(settings)) | {"qk_norm": "head"}
    num_layers, full = fields["num_layers"], settings.indices("full_attn_idxs")
    kinds = layer_kinds(
        settings, num_layers, lambda index: FULL if full is None or index in full else _CONV, (FULL, _CONV)
    )
    shape = ShortConvShape(
        hidden_size=fields["hidden_size"],
        conv_width=settings.count("conv_L_cache", 3, least=2),
        has_bias=settings.switch("conv_bias"),
    )
    return _with_recurrence(fields, kinds, _CONV, shape)


def _qwen3_next(settings: Settings) -> Fields:
    return with_qwen_experts(settings, _qwen3_5(settings, is_fused=True))


def _qwen3_5_moe(settings: Settings) -> Fields:
    # Every layer has experts, whose weights are normalized whatever the file says.
    settings = settings.replaced(norm_topk_prob=True, intermediate_size=settings.count("moe_intermediate_size"))
    return with_qwen_experts(settings, _qwen3_5(settings))


def _qwen3_5(settings: Settings, *, is_fused: bool = False) -> Fields:
    """Read Gated DeltaNet in most layers, gated attention in the others. is_fused: see DeltaNetShape."""
    settings.choice("hidden_act", ("silu", "swish"), "silu")  # of the recurrence, too
    fields = with_rope(settings, common(settings), can_be_partial=True)
    key = "mtp_num_hidden_layers" if "mtp_num_hidden_layers" in settings else "num_nextn_predict_layers"
    fields |= {"num_further_layers": settings.count(key, 0, least=0)}
    fields |= {"qk_norm": "head", "norms_add_one": True, "norms_round_late": True, "has_attention_gate": True}
    shape = DeltaNetShape(
        hidden_size=fields["hidden_size"],
        num_key_heads=settings.count("linear_num_key_heads"),
        num_value_heads=settings.count("linear_num_value_heads"),
        key_dim=settings.count("linear_key_head_dim"),
        value_dim=settings.count("linear_value_head_dim"),
        conv_width=settings.count("linear_conv_kernel_dim", least=2),
        norm_eps=fields["rms_norm_eps"],
        is_fused=is_fused,
    )
    interval, num_layers = settings.count("full_attention_interval", 4), fields["num_layers"]
    kinds = layer_kinds(settings, num_layers, lambda index: LINEAR if (index + 1) % interval else FULL, (FULL, LINEAR))
    return _with_recurrence(fields, kinds, LINEAR, shape)


_GRANITE_MOE = {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN = {"max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25}
_QWEN |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_QWEN |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_QWEN_MOE = _QWEN | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_key_value_heads": 2}

FAMILIES = (
    Family("GraniteMoeForCausalLM", ("granitemoe",), _granite_moe, _GRANITE_MOE, _GRANITE_EXPERTS),
    Family(
        "GraniteMoeHybridForCausalLM",
        ("granitemoehybrid",),
        _granite_hybrid,
        _GRANITE_MOE
        | {"shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
        | {"mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2},
        (
            *_GRANITE_EXPERTS,
            Stored(_GRANITE_SHARED_IN, "mlp.{}", _GATE_UP, of="dense"),
            Stored(_GRANITE_SHARED_IN, "mlp.shared_experts.{}", _GATE_UP, of="sparse"),
            Stored(_GRANITE_SHARED_OUT, "mlp.down_proj", of="dense"),
            Stored(_GRANITE_SHARED_OUT, "mlp.shared_experts.down_proj", of="sparse"),
        ),
    ),
    Family(
        "NemotronHForCausalLM",
        ("nemotron_h",),
        _nemotron_h,
        {"layer_norm_epsilon": 1e-5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        | {"max_position_embeddings": 4096, "intermediate_size": 21504, "n_routed_experts": 8, "n_shared_experts": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
        (
            Stored(r"mixer\.(in_proj|out_proj|conv1d|A_log|D|dt_bias|norm)", "mamba.{0}"),
            Stored(r"mixer\.([qkvo]_proj)", "self_attn.{0}"),
            Stored(r"mixer\.(.+)", "mlp.{0}"),
            Stored(r"(?<=\d\.)norm", "input_layernorm"),
            Stored("norm_f", "norm"),
            Stored("embeddings", "embed_tokens"),
        ),
    ),
    Family(
        "Lfm2ForCausalLM",
        ("lfm2",),
        _lfm2,
        {"num_key_value_heads": 8, "rope_theta": 1e6, "max_position_embeddings": 128_000},
        (
            Stored("operator_norm", "input_layernorm"),
            Stored("ffn_norm", "post_attention_layernorm"),
            Stored(r"feed_forward\.w1", "mlp.gate_proj"),
            Stored(r"feed_forward\.w3", "mlp.up_proj"),
            Stored(r"feed_forward\.w2", "mlp.down_proj"),
            Stored(r"self_attn\.([qk])_layernorm", "self_attn.{0}_norm"),
            Stored(r"self_attn\.out_proj", "self_attn.o_proj"),
            Stored("embedding_norm", "norm"),
        ),
    ),
    Family(
        "Qwen3NextForCausalLM",
        ("qwen3_next",),
        _qwen3_next,
        _QWEN_MOE | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        stacked_experts(),
    ),
    Family("Qwen3_5ForCausalLM", ("qwen3_5_text",), _qwen3_5, _QWEN | {"num_key_value_heads": 4}),
    Family(
        "Qwen3_5MoeForCausalLM",
        ("qwen3_5_moe_text",),
        _qwen3_5_moe,
        _QWEN_MOE | {"num_experts": 256, "num_experts_per_tok": 8},
        stacked_experts(),
    ),
)
