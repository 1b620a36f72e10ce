"""DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash and Mistral Small 4: latent attention, and experts beside a shared one."""

from __future__ import annotations

from core.model.families.family import (
    Family,
    Fields,
    common,
    count_experts,
    stacked_experts,
    with_rope,
    with_sparse,
)
from core.model.families.llama import with_query_scaling
from core.model.settings import Settings
from core.model.shape import ExpertsConfig, LatentConfig
from core.types.errors import SpecError


def _deepseek_v2(settings: Settings) -> Fields:
    method = settings.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise SpecError(f"topk_method {method} is not supported")
    # V2 configs set norm_topk_prob, but DeepSeek's code for greedy models and transformers both ignore it.
    settings.get("norm_topk_prob")
    fields = _with_latents(settings, is_interleaved=True)
    return with_experts(settings, fields, scores="softmax", normalizes=False, has_groups=method != "greedy")


def _deepseek_v3(settings: Settings) -> Fields:
    if (method := settings.get("topk_method") or "noaux_tc") != "noaux_tc":
        raise SpecError(f"topk_method {method} is not supported")
    fields = _with_latents(settings, is_interleaved=settings.switch("rope_interleave", True))
    return with_experts(settings, fields, scores="sigmoid", normalizes=settings.switch("norm_topk_prob", True))


def _mistral4(settings: Settings) -> Fields:
    fields = _with_latents(settings, is_interleaved=settings.switch("rope_interleave", True))
    fields = with_experts(settings, fields, scores="softmax", normalizes=settings.switch("norm_topk_prob", True))
    return with_query_scaling(settings, fields)


def _with_latents(settings: Settings, *, is_interleaved: bool) -> Fields:
    latent = LatentConfig(
        latent_dim=settings.count("kv_lora_rank"),
        rope_dim=settings.count("qk_rope_head_dim"),
        nope_dim=settings.count("qk_nope_head_dim"),
        value_dim=settings.count("v_head_dim"),
        query_dim=settings.count("q_lora_rank") if "q_lora_rank" in settings else None,
    )
    head_dim = latent.nope_dim + latent.rope_dim
    # The cache has one row per token, like the keys of a single head.
    cached = settings.replaced(num_key_value_heads=1, head_dim=head_dim)
    return with_rope(settings, common(cached), is_interleaved=is_interleaved, rotated=latent.rope_dim) | {
        "latent": latent
    }


def with_experts(
    settings: Settings, fields: Fields, *, scores: str, normalizes: bool, has_groups: bool = True
) -> Fields:
    """Add routed experts beside shared ones. scores: of the router; sigmoid scores have a correction bias."""
    num_layers: int = fields["num_layers"]
    kinds = settings.per_layer("mlp_layer_types", num_layers, ("dense", "sparse"))
    first = settings.count("first_k_dense_replace", 0, least=0)
    is_sparse = [kinds[i] == "sparse" if kinds else i >= first for i in range(num_layers)]
    if not settings.get("n_routed_experts") or not any(is_sparse):
        return fields
    if settings.get("moe_layer_freq", 1) != 1:
        raise SpecError("moe_layer_freq other than 1 is not supported")
    settings.choice("scoring_func", (scores,), scores)
    num_shared, size = settings.count("n_shared_experts", 0, least=0), settings.count("moe_intermediate_size")
    counts = count_experts(settings, "n_routed_experts")
    fields["experts"] = ExpertsConfig(
        **counts,
        **(_groups(settings, counts, best=2 if scores == "sigmoid" else 1) if has_groups else {}),
        intermediate_size=size,
        normalizes_weights=normalizes,
        shared_size=size * num_shared,
        scores="sigmoid" if scores == "sigmoid" else "softmax",
        has_correction_bias=scores == "sigmoid",
        weight_scale=settings.real("routed_scaling_factor", 1.0),
        scores_in_fp32=True,
    )
    return with_sparse(fields, is_sparse)


def _groups(settings: Settings, counts: Fields, *, best: int) -> Fields:
    """Read the groups of experts. best: experts whose scores rank a group. Raises SpecError."""
    num_experts, num_per_token = counts["num_experts"], counts["num_per_token"]
    num_groups = settings.count("n_group", 1, most=num_experts)
    num_groups_per_token = settings.count("topk_group", 1, most=num_groups)
    size, rest = divmod(num_experts, num_groups)
    if num_groups > 1 and (rest or size < best or size * num_groups_per_token < num_per_token):
        raise SpecError(
            f"n_group {num_groups} and topk_group {num_groups_per_token} do not fit {num_experts} n_routed_experts and "
            f"{num_per_token} num_experts_per_tok: groups need one size, at least {best} experts each, and together "
            "those of a token"
        )
    return {"num_groups": num_groups, "num_groups_per_token": num_groups_per_token}


FAMILIES = (
    Family(architectures=("DeepseekV2ForCausalLM",), model_types=("deepseek_v2",), read=_deepseek_v2),
    Family(
        architectures=("DeepseekV3ForCausalLM",),
        model_types=("deepseek_v3", "kimi_k2"),
        read=_deepseek_v3,
        defaults={"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "n_routed_experts": 256}
        | {"n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536},
    ),
    Family(
        architectures=("Glm4MoeLiteForCausalLM",),
        model_types=("glm4_moe_lite",),
        read=_deepseek_v3,
        defaults={"first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}
        | {"n_routed_experts": 64, "n_shared_experts": 1, "q_lora_rank": 768},
    ),
    Family(architectures=("Mistral4ForCausalLM",), model_types=("mistral4",), read=_mistral4, stored=stacked_experts()),
)
