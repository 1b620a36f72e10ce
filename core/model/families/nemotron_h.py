"""Nemotron-H and Nemotron 3: layers of one part each, which is Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from core.model.families.deepseek import with_experts
from core.model.families.family import FULL, LINEAR, Family, Fields, Stored, common, layer_kinds, with_rope
from core.model.recurrent import MambaShape
from core.model.settings import Settings
from core.model.shape import Activation
from core.types.errors import SpecError

_EXPERTS = "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": _EXPERTS}


def _nemotron_h(settings: Settings) -> Fields:
    key = "layers_block_type" if "layers_block_type" in settings else "layer_types"
    kinds = _kinds(settings, key, "hybrid_override_pattern")
    settings.choice("mlp_hidden_act", ("relu2",), "relu2")
    settings = settings.replaced(num_hidden_layers=len(kinds), rms_norm_eps=settings.real("layer_norm_epsilon"))
    # Attention is not as elsewhere.
    fields = with_rope(settings, common(settings)) | {"has_qkv_bias": False, "has_output_bias": False}
    fields |= {"norms_round_late": True, "activation": Activation("relu2")}
    recurrent = _mamba(settings, fields)
    layer, no_mlp = replace(fields["layers"][0], rope=None, has_mixer=False), {"has_mixer": True, "has_mlp": False}
    mixers = {LINEAR: replace(layer, recurrent=recurrent, **no_mlp), FULL: replace(layer, **no_mlp)}
    return _with_experts(settings, fields | {"layers": tuple(mixers.get(kind, layer) for kind in kinds)}, kinds)


def _kinds(settings: Settings, key: str, pattern_key: str) -> list[str]:
    """Return the kind of each layer, from a list or a pattern. Raises SpecError."""
    pattern = settings.get(pattern_key)
    if key not in settings and isinstance(pattern, str) and pattern and set(pattern) <= _LETTERS.keys():
        return [_LETTERS[letter] for letter in pattern]
    if not isinstance(listed := settings.get(key), list):
        raise SpecError(
            f"{key} is {listed!r:.60} and {pattern_key} {pattern!r:.60}; one must give the kind of each layer, as a "
            f"list or in letters of {''.join(_LETTERS)}"
        )
    return layer_kinds(settings, len(listed), lambda index: "mlp", tuple(_LETTERS.values()), key=key)


def _mamba(settings: Settings, fields: Fields) -> MambaShape:
    settings.choice("mamba_hidden_act", ("silu",), "silu")
    # The model's own code uses these limits; transformers 5.23 uses time_step_min instead.
    min_dt, max_dt = settings.limits("time_step_limit", (0.0, inf))
    return MambaShape(
        hidden_size=fields["hidden_size"],
        num_heads=settings.count("mamba_num_heads"),
        head_dim=settings.count("mamba_head_dim"),
        num_groups=settings.count("n_groups"),
        state_dim=settings.count("ssm_state_size"),
        conv_width=settings.count("conv_kernel", least=2),
        norm_eps=fields["rms_norm_eps"],
        min_dt=min_dt,
        max_dt=max_dt,
        has_conv_bias=settings.switch("use_conv_bias", True),
        has_bias=settings.switch("use_bias"),
    )


def _with_experts(settings: Settings, fields: Fields, kinds: list[str]) -> Fields:
    settings = settings.replaced(mlp_layer_types=["sparse" if kind == _EXPERTS else "dense" for kind in kinds])
    shared, latent = (
        settings.count("moe_shared_expert_intermediate_size"),
        settings.count("moe_latent_size", 0, least=0),
    )
    fields = with_experts(settings, fields, scores="sigmoid", normalizes=settings.switch("norm_topk_prob", True))
    if experts := fields.get("experts"):
        if fields["has_mlp_bias"]:
            raise SpecError("mlp_bias true is not supported beside experts")
        fields["experts"] = replace(experts, shared_size=shared, latent_size=latent)
    if fields["num_further_layers"]:
        predictor = _kinds(settings, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
        fields["num_further_layers"] *= experts is not None and predictor == [FULL, _EXPERTS]
    return fields


FAMILIES = (
    Family(
        architectures=("NemotronHForCausalLM",),
        model_types=("nemotron_h",),
        read=_nemotron_h,
        defaults={"layer_norm_epsilon": 1e-5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        | {"max_position_embeddings": 4096, "intermediate_size": 21504, "n_routed_experts": 8, "n_shared_experts": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
        | {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
        stored=(
            Stored(pattern=r"mixer\.(in_proj|out_proj|conv1d|A_log|D|dt_bias|norm)", name="mamba.{0}"),
            Stored(pattern=r"mixer\.([qkvo]_proj)", name="self_attn.{0}"),
            Stored(pattern=r"mixer\.(.+)", name="mlp.{0}"),
            Stored(pattern=r"(?<=\d\.)norm", name="input_layernorm"),
            Stored(pattern="norm_f", name="norm"),
            Stored(pattern="embeddings", name="embed_tokens"),
        ),
    ),
)
