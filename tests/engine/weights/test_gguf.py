"""GGUF files of every supported type and architecture, compared with transformers on the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

from core.model.gguf_file import GGML_TYPES, StoredTensor, write_table
from core.model.gguf_import import import_gguf
from core.types.errors import SpecError
from engine.weights.open_checkpoint import open_checkpoint
from tests.engine.gguf_files import finish, random_blocks, write_model
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import GROUPS, YARN, MakeRunner, random_model, reference_logits, tiny_config

# Inputs of all matrices are multiples of 32, the block of most types.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = ROPE | {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
GEMMA = {"sliding_window": 9, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "num_hidden_layers": 4,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9, "intermediate_size": 64}
DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}

# Family and settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True}),
    **{
        f"llama, {scaling}": ("llama", {"rope_parameters": ROPE | {"rope_type": scaling, "factor": 4.0} | more})
        for scaling, more in (
            ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}),
            ("linear", {}),
            ("yarn", {"original_max_position_embeddings": 32}),
        )
    },
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral, sliding window": ("mistral", {"sliding_window": 9}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3", GEMMA | {"num_hidden_layers": 7, "final_logit_softcapping": None}),
    "gemma3, scaled": (
        "gemma3",
        GEMMA
        | {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "sliding_attention": ROPE | {"rope_theta": 500.0},
                "full_attention": ROPE | {"rope_type": "linear", "factor": 4.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 11}),
    "phi3, partly rotated": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "gpt_oss": ("gpt_oss", LOCAL | {"rope_parameters": YARN | {"truncate": False}}),
    "gpt_oss, plain rotation": ("gpt_oss", LOCAL | {"rope_parameters": ROPE}),
    "glm4_moe": ("glm4_moe", ROUTED | GROUPS | {"attention_bias": True, "use_qk_norm": True}),
    "glm4_moe, plain": ("glm4_moe", ROUTED | {"norm_topk_prob": False}),
    "deepseek_v2": ("deepseek_v2", ROUTED | LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        ROUTED | LATENT | GROUPS | {"topk_method": "group_limited_greedy", "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek_v3": ("deepseek_v3", ROUTED | LATENT | GROUPS | {"rope_parameters": DEEPSEEK_YARN}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        ROUTED | LATENT | {"mlp_layer_types": ["dense", *["sparse"] * 3], "norm_topk_prob": True},
    ),
}
# Blocks of 256 inputs.
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "initializer_range": 0.1}
CASES["qwen3_moe, wide"] = ("qwen3_moe", EXPERTS | WIDE)
# Types with which a model is written; the other models are written in float32.
QUANTIZED = [
    *(("llama", kind) for kind in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")),
    *(("qwen2", "Q8_0"), ("qwen2, tied", "F16"), ("qwen3", "Q8_0"), ("mistral, sliding window", "Q8_0")),
    ("mixtral", "Q4_0"),
    *(("qwen3_moe, wide", "Q4_K"), ("gemma2", "Q8_0"), ("gemma3", "Q4_0"), ("phi3", "Q8_0"), ("qwen3_moe", "Q4_0")),
    *(("gpt_oss", "MXFP4"), ("glm4_moe", "F16"), ("deepseek_v3", "Q8_0")),
]


def model_of(name: str, **settings: Any) -> PreTrainedModel:
    family, changes = CASES[name]
    return random_model(tiny_config(family, **SHAPE | changes | settings))


def check(
    name: str, make_runner: MakeRunner, directory: Path, *, layer_types: list[str] | None = None, **settings: Any
) -> None:
    """Write a random model, import the file, and compare the logits after 60 tokens."""
    model = model_of(name, **{} if layer_types is None else {"layer_types": layer_types})
    write_model(directory / "m.gguf", model, **settings)
    import_gguf(directory / "m.gguf", directory)
    runner, (tokens,) = make_runner(directory), prompts(60)
    assert runner.config.eos_token_ids == (130,)
    logits = step(runner, [tokens], [(0, 0, 60)])
    torch.testing.assert_close(logits[0], reference_logits(model, tokens)[-1], atol=2e-4, rtol=1e-4)


def test_early_mixtral_has_a_tensor_for_each_expert(make_runner: MakeRunner, tmp_path: Path) -> None:
    check("mixtral", make_runner, tmp_path, splits_experts=True)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    extra: dict[str, np.ndarray] = {}
    # Stored as a tensor of divisors of the frequencies.
    if name == "llama, llama3":
        plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
        extra["rope_freqs.weight"] = plain / model_of(name).model.rotary_emb.inv_freq.numpy()
    check(name, make_runner, tmp_path, extra=extra)


@pytest.mark.parametrize(("name", "kind"), QUANTIZED)
def test_logits_equal_the_dequantized_model(name: str, kind: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    check(name, make_runner, tmp_path, quantized=kind)


def test_older_files_keep_the_expansion_of_latents_whole(make_runner: MakeRunner, tmp_path: Path) -> None:
    check("deepseek_v2, groups", make_runner, tmp_path, is_absorbed=False)


def test_layers_that_predict_further_tokens_are_left_out(make_runner: MakeRunner, tmp_path: Path) -> None:
    extra = {f"blk.4.{name}.weight": np.ones((64, 64), np.float32) for name in ("nextn.eh_proj", "attn_q")}
    metadata = {"glm4moe.block_count": 5, "glm4moe.nextn_predict_layers": 1}
    check("glm4_moe, plain", make_runner, tmp_path, metadata=metadata, extra=extra)


@pytest.mark.parametrize("pattern", [3, [True, True, False] * 2 + [True]], ids=str)
def test_pattern_of_windows(pattern: Any, make_runner: MakeRunner, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    metadata = {"gemma3.attention.sliding_window_pattern": pattern}
    check("gemma3", make_runner, tmp_path, metadata=metadata, layer_types=kinds)


@pytest.mark.parametrize(("num_layers", "expected"), [(2, 24), (46, 16)])
def test_the_widest_gemma_scales_scores_by_its_width(num_layers: int, expected: int, tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", model_of("gemma2", num_hidden_layers=num_layers, head_dim=24))
    import_gguf(tmp_path / "m.gguf", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["query_pre_attn_scalar"] == expected


@pytest.mark.parametrize(
    ("name", "metadata", "complaint"),
    [
        ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func is 2, which is not supported"),
        ("qwen3_moe", {"qwen3moe.expert_shared_count": 1}, "expert_shared_count is 1"),
        ("gpt_oss", {"gpt-oss.rope.freq_base_swa": 7.0}, r"rope.freq_base_swa is 7.0"),
        ("gpt_oss", {"gpt-oss.rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor is 2.0"),
        ("glm4_moe", {"glm4moe.expert_gating_func": 1}, "expert_gating_func is not sigmoid"),
        ("deepseek_v2", {"deepseek2.expert_weights_norm": True}, "expert_weights_norm is not supported for softmax"),
        ("deepseek_v2", {"deepseek2.attention.temperature_scale": 0.1}, "temperature_scale is 0.1"),
        ("gemma2", {"gemma2.attention.causal": False}, "causal is False"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 9.0}, "attn_logit_softcapping is 9.0"),
        ("phi3", {"phi3.expert_count": 2}, "expert_count is 2"),
    ],
)
def test_metadata_that_changes_numbers_is_rejected(
    name: str, metadata: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "m.gguf", model_of(name), metadata=metadata)
    with pytest.raises(SpecError, match=complaint) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_experts_stay_in_their_bits(
    name: str, kind: str, make_runner: MakeRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = CASES[name][1]
    # All experts are chosen, because rounding may choose others.
    every = {"num_experts_per_tok": changes.get("num_local_experts") or changes.get("num_experts") or 8}
    every |= {"initializer_range": 0.1}  # larger ones amplify rounding
    every |= {} if name != "glm4_moe" else {"n_group": 1, "topk_group": 1}
    write_model(tmp_path / "m.gguf", model_of(name, **every), quantized=kind)
    import_gguf(tmp_path / "m.gguf", tmp_path)
    (tokens,) = prompts(30)
    stored, wide = (
        step(make_runner(tmp_path, dtype="bfloat16", weights=weights), [tokens], [(0, 0, 30)])[0].float()
        for weights in ("auto", "widen")
    )
    assert "are held in" not in caplog.text
    assert (stored - wide).norm() < 0.12 * wide.norm()
    assert not torch.equal(stored, wide)


@pytest.mark.parametrize("kind", GGMLQuantizationType, ids=lambda kind: kind.name)
def test_types_are_those_that_gguf_dequantizes(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except NotImplementedError:
        path = tmp_path / "m.gguf"
        write_model(path, model_of("llama"))
        content = bytearray(path.read_bytes())
        name = b"token_embd.weight"
        at = content.index(name) + len(name) + 4 + 2 * 8
        content[at : at + 4] = int(kind).to_bytes(4, "little")
        path.write_bytes(content)
        with pytest.raises(SpecError, match=rf"tensor token_embd.weight has type {kind.name}, .* use a file of type"):
            import_gguf(path, tmp_path)
    else:
        assert GGML_TYPES[kind] == (kind.name, block, num_bytes)


@pytest.mark.parametrize("name", [kind.name for kind in GGML_TYPES.values() if kind.block > 1])
def test_slices_of_quantized_tensors(name: str, tmp_path: Path) -> None:
    """Any rows and columns equal those of the whole tensor as dequantized by gguf."""
    kind = GGMLQuantizationType[name]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 24, 3 * block
    blocks = random_blocks(kind, rows * 3)
    (tmp_path / "data").write_bytes(b"offset" + blocks.tobytes())
    stored = StoredTensor(name="w", ggml_type=int(kind), shape=(rows, columns), file=str(tmp_path / "data"), offset=6)
    assert stored.num_bytes == blocks.nbytes
    write_table(tmp_path, [stored])
    checkpoint = open_checkpoint(tmp_path)
    whole = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(rows, -1), kind))
    assert whole.isfinite().all() and whole.std() > 0
    assert torch.equal(checkpoint.read("w"), whole)
    assert torch.equal(checkpoint.read("w", rows=(5, 11)), whole[5:11])
    assert torch.equal(checkpoint.read("w", columns=(7, block + 9)), whole[:, 7 : block + 9])
    assert torch.equal(checkpoint.read("w", rows=(2, 3), columns=(0, 1)), whole[2:3, :1])


def test_split_files(make_runner: MakeRunner, tmp_path: Path) -> None:
    model = model_of("llama")
    write_model(tmp_path / "whole.gguf", model)
    names = split(tmp_path / "whole.gguf", parts=3)
    directory = tmp_path / "imported"
    directory.mkdir()
    import_gguf(tmp_path / names[0], directory)
    (tokens,) = prompts(20)
    logits = step(make_runner(directory), [tokens], [(0, 0, 20)])
    torch.testing.assert_close(logits[0], reference_logits(model, tokens)[-1], atol=2e-4, rtol=1e-4)
    (tmp_path / names[1]).unlink()
    with pytest.raises(SpecError, match=f"missing beside it: {names[1]}"):
        import_gguf(tmp_path / names[0], directory)


def split(whole: Path, *, parts: int) -> list[str]:
    """Split a file as llama-gguf-split does: metadata in the first part, tensors distributed over all."""
    reader = gguf.GGUFReader(whole)
    names = [f"m-{part:05}-of-{parts:05}.gguf" for part in range(1, parts + 1)]
    for part, name in enumerate(names):
        writer = gguf.GGUFWriter(whole.parent / name, "llama")
        for key, field in reader.fields.items() if part == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                element = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], element)
        for tensor in reader.tensors[part::parts]:
            writer.add_tensor(tensor.name, tensor.data)
        finish(writer)
    return names
