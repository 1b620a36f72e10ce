"""LFM2: gated short convolutions in most layers, attention in the others."""

from __future__ import annotations

from core.model.families.family import (
    FULL,
    Family,
    Fields,
    Stored,
    common,
    layer_kinds,
    with_recurrent_layers,
    with_rope,
)
from core.model.recurrent import ShortConvShape
from core.model.settings import Settings

_CONV = "conv"


def _lfm2(settings: Settings) -> Fields:
    norm_eps = settings.real("norm_eps", 1e-5)
    size = settings.count("block_ff_dim") if "block_ff_dim" in settings else settings.count("intermediate_size")
    if settings.switch("block_auto_adjust_ff_dim", True):
        multiple = settings.count("block_multiple_of", 256)
        size = int(settings.real("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        size = -(-size // multiple) * multiple
    tied = settings.switch("tie_embedding", settings.switch("tie_word_embeddings", True))
    settings = settings.replaced(intermediate_size=size, rms_norm_eps=norm_eps, tie_word_embeddings=tied)
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
    return with_recurrent_layers(fields, [kind == _CONV for kind in kinds], shape)


FAMILIES = (
    Family(
        architectures=("Lfm2ForCausalLM",),
        model_types=("lfm2",),
        read=_lfm2,
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "max_position_embeddings": 128_000},
        stored=(
            Stored(pattern="operator_norm", name="input_layernorm"),
            Stored(pattern="ffn_norm", name="post_attention_layernorm"),
            Stored(pattern=r"feed_forward\.w1", name="mlp.gate_proj"),
            Stored(pattern=r"feed_forward\.w3", name="mlp.up_proj"),
            Stored(pattern=r"feed_forward\.w2", name="mlp.down_proj"),
            Stored(pattern=r"self_attn\.q_layernorm", name="self_attn.q_norm"),
            Stored(pattern=r"self_attn\.k_layernorm", name="self_attn.k_norm"),
            Stored(pattern=r"self_attn\.out_proj", name="self_attn.o_proj"),
            Stored(pattern="embedding_norm", name="norm"),
        ),
    ),
)
