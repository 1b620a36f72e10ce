"""DeepSeek-V2 to V3.2, Kimi-K2, GLM-4.5 to GLM-5 and Mistral Small 4: latent attention, experts beside shared ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.model.families.family import (
    Family,
    Fields,
    common,
    count_experts,
    stacked_experts,
    with_default_rope,
    with_layers,
    with_rope,
)
from core.model.families.llama import with_query_scaling
from core.model.settings import Settings
from core.model.shape import ExpertsConfig, IndexConfig, LatentConfig
from core.types.errors import SpecError

_V3 = {
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


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


def _deepseek_v32(settings: Settings) -> Fields:
    return _with_indexers(settings, _deepseek_v3(settings), is_interleaved=False, shares=())


def _glm_moe_dsa(settings: Settings) -> Fields:
    fields = _deepseek_v3(settings)
    # transformers rotates adjacent pairs and ignores the file's setting.
    if not settings.switch("indexer_rope_interleave", True):
        raise SpecError("indexer_rope_interleave false is not supported for GLM-5; supported: true")
    shares = _sharing_layers(settings, fields["num_layers"])
    return _with_indexers(settings, fields, is_interleaved=True, shares=shares)


def _with_indexers(settings: Settings, fields: Fields, *, is_interleaved: bool, shares: Sequence[int]) -> Fields:
    """Add the indexer of sparse attention. shares: layers without an indexer. Raises SpecError."""
    latent: LatentConfig = fields["latent"]
    index = IndexConfig(
        num_heads=settings.count("index_n_heads"),
        head_dim=settings.count("index_head_dim", least=latent.rope_dim),
        top_k=settings.count("index_topk"),
        is_interleaved=is_interleaved,
    )
    if latent.query_dim is None:
        raise SpecError("q_lora_rank is missing: index queries are projections of the short queries")
    has_indexer = [layer not in shares for layer in range(fields["num_layers"])]
    return with_layers(fields | {"latent": replace(latent, index=index)}, has_indexer=has_indexer)


def _sharing_layers(settings: Settings, num_layers: int) -> list[int]:
    """Return the layers that attend to the positions of an earlier layer. Raises SpecError.

    `indexer_types` decides, then `index_topk_pattern`, then `index_topk_freq`, as in transformers.
    """
    if isinstance(pattern := settings.get("index_topk_pattern"), str):
        names = {"F": "full", "S": "shared"}
        settings = settings.replaced(index_topk_pattern=[names.get(letter, letter) for letter in pattern])
    interval = max(1, settings.count("index_topk_freq", 1, least=0))
    offset = settings.count("index_skip_topk_offset", 2, least=0)
    found = [settings.per_layer(key, num_layers, ("full", "shared")) for key in ("indexer_types", "index_topk_pattern")]
    kinds = found[0] or found[1]
    shares = [i for i in range(num_layers) if (kinds[i] == "shared" if kinds else max(0, i - offset + 1) % interval)]
    if 0 in shares:
        raise SpecError("layer 0 shares the positions of an earlier layer, and must have an indexer")
    return shares


def _mistral4(settings: Settings) -> Fields:
    if (num_groups := settings.get("n_group", 1)) != 1:
        raise SpecError(f"n_group {num_groups!r:.60} is not supported for Mistral 4; supported: 1")
    settings = with_default_rope(settings, _MISTRAL4_ROPE)
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
    """Add routed experts beside shared ones. scores: the router's activation; sigmoid scores have a correction bias."""
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
    return with_layers(fields, is_sparse=is_sparse)


def _groups(settings: Settings, counts: Fields, *, best: int) -> Fields:
    """Read the groups of experts. best: number of experts whose scores rank a group. Raises SpecError."""
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


def _glm4_moe(settings: Settings) -> Fields:
    """Read GLM-4.5, 4.6 and 4.7: the same experts, with grouped-query attention."""
    fields = with_rope(settings, common(settings), can_be_partial=True) | {"has_output_bias": False}
    if settings.switch("use_qk_norm"):
        fields["qk_norm"] = "head"
    return with_experts(settings, fields, scores="sigmoid", normalizes=settings.switch("norm_topk_prob", True))


FAMILIES = (
    Family(
        "DeepseekV2ForCausalLM",
        ("deepseek_v2",),
        _deepseek_v2,
        {"max_position_embeddings": 2048, "q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2},
    ),
    Family("DeepseekV3ForCausalLM", ("deepseek_v3", "kimi_k2"), _deepseek_v3, _V3),
    Family(
        "Glm4MoeLiteForCausalLM",
        ("glm4_moe_lite",),
        _deepseek_v3,
        {"first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}
        | {"n_routed_experts": 64, "n_shared_experts": 1, "q_lora_rank": 768}
        | {"num_experts_per_tok": 4, "max_position_embeddings": 202752},
    ),
    Family(
        "DeepseekV32ForCausalLM",
        ("deepseek_v32",),
        _deepseek_v32,
        _V3 | {"max_position_embeddings": 163840, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    ),
    Family(
        "GlmMoeDsaForCausalLM",
        ("glm_moe_dsa",),
        _glm_moe_dsa,
        {"routed_scaling_factor": 2.5, "n_routed_experts": 256, "rms_norm_eps": 1e-5}
        | {"n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 2048}
        | {"num_experts_per_tok": 8, "max_position_embeddings": 202752}
        | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32},
    ),
    Family(
        "Mistral4ForCausalLM",
        ("mistral4",),
        _mistral4,
        {"max_position_embeddings": 1048576, "q_lora_rank": 1024}
        | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4},
        stacked_experts(),
    ),
    Family(
        "Glm4MoeForCausalLM",
        ("glm4_moe", "glm4v_moe_text"),
        _glm4_moe,
        {"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072}
        | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
    ),
)
