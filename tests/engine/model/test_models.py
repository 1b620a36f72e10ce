"""Engine models compared with transformers: every family, chunked and whole, alone and batched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from core.types.errors import RequestError, SpecError
from core.types.request import SequenceRequest
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DELTA_NET,
    DELTA_NET_MOE,
    GEMMA,
    GEMMA3_ROPES,
    GEMMA4,
    GEMMA4_MOE,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    GPT_OSS,
    GRANITE_HYBRID,
    GROUPS,
    LFM2,
    LLAMA4,
    MINIMAX_M2,
    MISTRAL4,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    PHI3,
    QUERY_SCALING,
    YARN,
    MakeModel,
    MakeRunner,
    reference_logits,
)
from tests.support.grids import quick

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DEEPSEEK_YARN = {"mscale": 0.7, "mscale_all_dim": 1.1}

QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 36,
}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 2.5}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "llama, one head for all": ("llama", {"num_key_value_heads": 1}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, llama3 rope, no waves between": ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}}),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, yarn rope of other shape": (
        "llama",
        {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 1.2, "mscale_all_dim": 0.7}},
    ),
    "mistral": ("mistral", {}),
    "mistral, sliding window": ("mistral", {"sliding_window": 11}),
    "qwen2": ("qwen2", {}),
    "qwen2, some layers slide": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, sliding window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 11}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe, some layers dense": (
        "qwen3_moe",
        QWEN3_MOE | {"mlp_only_layers": [1], "decoder_sparse_step": 1, "norm_topk_prob": False},
    ),
    "qwen2_moe": ("qwen2_moe", QWEN2_MOE),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK_V2),
    "deepseek_v2, groups, short queries": (
        "deepseek_v2",
        DEEPSEEK_V2 | GROUPS | {"topk_method": "group_limited_greedy", "q_lora_rank": 20, "attention_bias": True},
    ),
    "deepseek_v2, yarn": ("deepseek_v2", DEEPSEEK_V2 | {"rope_parameters": YARN | DEEPSEEK_YARN}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek_v3, gelu": ("deepseek_v3", DEEPSEEK_V3 | {"hidden_act": "gelu"}),
    "qwen2_moe, gelu": ("qwen2_moe", QWEN2_MOE | {"hidden_act": "gelu"}),
    "deepseek_v3, yarn": ("deepseek_v3", DEEPSEEK_V3 | {"rope_parameters": YARN | DEEPSEEK_YARN}),
    "deepseek_v3, all dense, long queries, halves": (
        "deepseek_v3",
        DEEPSEEK_V3 | {"first_k_dense_replace": 3, "q_lora_rank": None, "rope_interleave": False},
    ),
    "deepseek_v3, weights as they are": ("deepseek_v3", DEEPSEEK_V3 | {"norm_topk_prob": False}),
    "qwen3, tied, biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 24}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3", GEMMA | {"num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPES}),
    # Only Gemma 2 caps the scores of attention.
    "gemma3, soft caps": ("gemma3", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma4": ("gemma4", GEMMA4),
    "gemma4, experts": ("gemma4", GEMMA4_MOE),
    # transformers saves an empty `per_layer_config`.
    "gemma4, equal heads, unused experts": ("gemma4", GEMMA4_MOE | {"global_head_dim": 16, "enable_moe_block": False}),
    "phi3": ("phi3", {"head_dim": ..., "partial_rotary_factor": 0.5}),
    "phi3, sliding window": ("phi3", {"head_dim": ..., "sliding_window": 9}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "glm4_moe": ("glm4_moe", GLM4_MOE),
    "glm4_moe_lite": ("glm4_moe_lite", GLM4_MOE_LITE),
    "deepseek_v32": ("deepseek_v32", DEEPSEEK_V32),
    "deepseek_v32, yarn, wide choice": (
        "deepseek_v32",
        DEEPSEEK_V32 | {"rope_parameters": YARN | DEEPSEEK_YARN, "index_topk": 16},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", GLM_MOE_DSA),
    "glm_moe_dsa, all layers choose": ("glm_moe_dsa", GLM_MOE_DSA | {"indexer_types": None, "index_topk": 37}),
    "glm_moe_dsa, every third layer chooses": (
        "glm_moe_dsa",
        GLM_MOE_DSA | {"indexer_types": None, "index_topk_freq": 3, "index_topk": 7},
    ),
    "minimax_m2": ("minimax_m2", MINIMAX_M2),
    "ministral3": ("ministral3", {"rope_parameters": YARN | QUERY_SCALING}),
    "mistral4": ("mistral4", MISTRAL4),
    "llama4": ("llama4", LLAMA4),
    "llama4, yarn": ("llama4", LLAMA4 | {"rope_parameters": YARN}),
    "granite": ("granite", GRANITE),
    "granite_moe": ("granite_moe", GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "granite_hybrid": ("granite_hybrid", GRANITE | GRANITE_HYBRID),
    "granite_hybrid, dense, rope": (
        "granite_hybrid",
        GRANITE | GRANITE_HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "lfm2": ("lfm2", LFM2),
    "lfm2, biases": (
        "lfm2",
        {"full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 4, "head_dim": ..., "hidden_act": "gelu"},
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON_H),
    "nemotron_h, biases": ("nemotron_h", NEMOTRON_H | {"use_bias": True, "mlp_bias": True, "use_conv_bias": False}),
    "nemotron_h, experts": ("nemotron_h", NEMOTRON_H_MOE | GROUPS),
    "nemotron_h, latents": ("nemotron_h", NEMOTRON_H_MOE | {"moe_latent_size": 36}),
    "qwen3_next": ("qwen3_next", DELTA_NET_MOE),
    "qwen3_5": ("qwen3_5", DELTA_NET),
    "qwen3_5_moe": ("qwen3_5_moe", DELTA_NET_MOE),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3, sliding window": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9},
    ),
    "llama4, no norms, fixed temperature": (
        "llama4",
        LLAMA4 | {"use_qk_norm": False, "attn_temperature_tuning": False, "interleave_moe_layer_step": 1},
    ),
}


# Families compared in half precision, and the changes that leave the router no choice.
_ALL_OF_SIX: dict[str, Any] = {"num_experts_per_tok": 6}
HALVES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "deepseek_v3": {"first_k_dense_replace": 3},
    "gemma2": {},
    "gemma3": {},
    "gemma4": {},
    "gemma4, experts": {"top_k_experts": 6},
    "phi3": {},
    "ministral3": {},
    "gpt_oss": _ALL_OF_SIX,
    "minimax_m2": _ALL_OF_SIX,
    "llama4": _ALL_OF_SIX,
    "glm4_moe": {"num_experts_per_tok": 8},
    "nemotron_h": {},
    "nemotron_h, latents": {"num_experts_per_tok": 8},
}


SAME_ROUNDING = ("llama", "qwen2", "qwen3", "deepseek_v3", "phi3", "ministral3", "glm4_moe", "minimax_m2")


@pytest.fixture(params=FAMILIES, ids=lambda name: name.replace(", ", "-").replace(" ", "_"))
def family(request: pytest.FixtureRequest, tiny_model: MakeModel) -> tuple[Path, PreTrainedModel]:
    architecture, changes = FAMILIES[request.param]
    return tiny_model(architecture, **changes)


def test_whole_prompts_equal_transformers(family: tuple[Path, PreTrainedModel], make_runner: MakeRunner) -> None:
    directory, model = family
    sequences = prompts(1, 37, 8, 80, 9, 10, 16, 17)  # windows are of 9 tokens, chunks of 16, blocks of 8
    logits = step(make_runner(directory), sequences, [(i, 0, len(s)) for i, s in enumerate(sequences)])
    for row, sequence in zip(logits, sequences, strict=True):
        torch.testing.assert_close(row, reference_logits(model, sequence)[-1], atol=2e-4, rtol=1e-4)


def test_chunks_beside_decode_rows_equal_transformers(
    family: tuple[Path, PreTrainedModel], make_runner: MakeRunner
) -> None:
    """Sequences at different stages share each step: chunks that end inside blocks, and single tokens."""
    directory, model = family
    runner, sequences = make_runner(directory), prompts(50, 50, 50)
    expected = [reference_logits(model, sequence) for sequence in sequences]
    cuts = [[0, 19, 20, 21, 43, 44, 50], [0, 7, 24, 25, 26, 27, 28], [0, 1, 2, 3, 35, 36, 37]]
    for number in range(6):
        spans = [(i, cut[number], cut[number + 1]) for i, cut in enumerate(cuts)]
        logits = step(runner, sequences, spans)
        for row, (i, _, end) in zip(logits, spans, strict=True):
            torch.testing.assert_close(row, expected[i][end - 1], atol=2e-4, rtol=1e-4)


def test_dynamic_rope_beyond_the_trained_range(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Each token's frequencies follow from its own position, as when transformers decodes token by token."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    directory, model = tiny_model("llama", max_position_embeddings=32, rope_parameters=rope)
    (tokens,) = prompts(48)
    with torch.inference_mode():
        past = model(torch.tensor([tokens[:32]]), use_cache=True)
        for token in tokens[32:]:
            past = model(torch.tensor([[token]]), past_key_values=past.past_key_values, use_cache=True)
    logits = step(make_runner(directory), [tokens], [(0, 0, 48)])
    torch.testing.assert_close(logits[0], past.logits[0, -1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("max_context", "lengths"), [(None, (20, 64)), (100, (65, 90))])
def test_longrope(
    max_context: int | None, lengths: tuple[int, ...], tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    """transformers chooses the divisors by each prompt's length, the engine by the deployment's context."""
    directory, model = tiny_model("phi3", **PHI3)
    sequences = prompts(*lengths)
    runner = make_runner(directory, max_context=max_context)
    logits = step(runner, sequences, [(i, 0, len(s)) for i, s in enumerate(sequences)])
    for row, sequence in zip(logits, sequences, strict=True):
        torch.testing.assert_close(row, reference_logits(model, sequence)[-1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in HALVES),
        *quick([(name, "float16") for name in HALVES], [("llama", "float16"), ("gemma2", "float16")]),
    ],
)
def test_half_precision_stays_within_its_noise(
    name: str, dtype: str, tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    """The engine in half precision is as close to fp32 as transformers in the same dtype.

    Without experts or with all of them, because the choice of experts may depend on rounding.
    """
    family, changes = FAMILIES[name]
    directory, model = tiny_model(family, **(changes | HALVES[name]))
    sequences = prompts(*[40] * 8)
    exact = torch.stack([reference_logits(model, s)[-1] for s in sequences])
    rounded_model = type(model).from_pretrained(directory, dtype=getattr(torch, dtype), experts_implementation="eager")
    theirs = torch.stack([reference_logits(rounded_model, s)[-1] for s in sequences])
    ours = step(make_runner(directory, dtype=dtype), sequences, [(i, 0, 40) for i in range(8)])
    assert (ours - exact).abs().mean() <= 1.3 * (theirs - exact).abs().mean()
    # Where both round at the same places, they are closer to each other than to fp32.
    assert (ours - theirs).abs().mean() <= (1.0 if name in SAME_ROUNDING else 1.6) * (theirs - exact).abs().mean()


@pytest.mark.parametrize(
    ("name", "changes", "pool_dtype", "most"),
    [
        *(
            (name, changes, dtype, 0.1)
            for name, changes in (("llama", {}), ("deepseek_v3", DEEPSEEK_V3))
            for dtype in ("fp8_e4m3", "int8")
        ),
        ("llama", {}, "int4", 0.3),
        *(("gemma4", GEMMA4, dtype, most) for dtype, most in (("fp8_e4m3", 0.15), ("int8", 0.1), ("int4", 0.5))),
    ],
)
def test_quantized_pool_is_close_and_independent_of_chunking(
    name: str, changes: dict[str, Any], pool_dtype: str, most: float, tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    directory, model = tiny_model(name, **changes)
    (tokens,) = prompts(40)
    whole = step(make_runner(directory, pool_dtype=pool_dtype), [tokens], [(0, 0, 40)])
    runner = make_runner(directory, pool_dtype=pool_dtype)
    for start in range(0, 40, 5):
        in_chunks = step(runner, [tokens], [(0, start, start + 5)])
    exact = reference_logits(model, tokens)[-1]
    error = (whole[0] - exact).abs().mean()
    assert 0 < error < most * exact.std()
    # Not equal: products of unlike numbers of rows differ in their last bits, which may change a code by one.
    assert (in_chunks - whole).abs().mean() < 0.1 * error


def test_layers_of_a_quantized_pool_in_the_models_dtype(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Layers are counted among those with KV of their own; layers that share it read it in its own dtype."""
    directory, model = tiny_model("gemma4", **GEMMA4)
    (tokens,) = prompts(40)
    exact, errors = reference_logits(model, tokens)[-1], []
    for layers in ((), (0, 1, -1), tuple(range(5))):
        runner = make_runner(directory, pool_dtype="int4", unquantized_layers=layers)
        for start in range(0, 40, 8):
            logits = step(runner, [tokens], [(0, start, start + 8)])
        errors.append(float((logits[0] - exact).norm() / exact.norm()))
    assert errors[2] < 1e-4 < errors[1] < errors[0]
    with pytest.raises(SpecError, match=r"layer 5 is out of range \[-5, 5\) of Gemma4ForCausalLM"):
        make_runner(directory, pool_dtype="int4", unquantized_layers=(5,))


def test_latents_are_not_stored_in_int4(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    directory, _ = tiny_model("deepseek_v3", **DEEPSEEK_V3)
    with pytest.raises(SpecError, match="int4 is not possible, because DeepseekV3ForCausalLM stores latents; use int8"):
        make_runner(directory, pool_dtype="int4")


def test_on_layer_is_called_after_the_kv_is_written(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    directory, _ = tiny_model("llama")
    runner = make_runner(directory)
    written = []

    def on_layer(layer: int) -> None:
        assert runner.pool.codes[layer][0].any() and not any(c[0].any() for c in runner.pool.codes[layer + 1 :])
        written.append(layer)

    batch = Batch.of([Row(token_ids=[1, 2, 3], start=0, blocks=[0], num_logits=0)], block_size=8)
    logits = runner.forward(batch, on_layer)
    assert written == [0, 1, 2]
    assert logits.shape == (0, 131)


def test_loading_reports_progress(tiny_model: MakeModel) -> None:
    directory, _ = tiny_model("llama")
    fractions: list[float] = []
    config = EngineConfig(model_dir=directory, dtype="float32", num_blocks=1)
    ModelRunner(config, progress=fractions.append)
    assert fractions == sorted(fractions) and fractions[-1] == 1.0


def _with_tensors(directory: Path, into: Path, changes: dict[str, torch.Tensor | None]) -> Path:
    """Copy a model with other tensors; None: without the tensor."""
    shutil.copytree(directory, into, dirs_exist_ok=True)
    tensors = load_file(into / "model.safetensors") | changes
    save_file({name: one for name, one in tensors.items() if one is not None}, into / "model.safetensors")
    return into


def test_error_names_wrong_tensors(tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path) -> None:
    directory, _ = tiny_model("llama")
    changes = {"model.layers.1.mlp.up_proj.weight": None, "model.norm.weight": torch.ones(7)}
    with pytest.raises(SpecError) as caught:
        make_runner(_with_tensors(directory, tmp_path, changes | {"model.extra": torch.ones(1)}))
    for part in ("missing: model.layers.1.mlp.up_proj.weight", "not expected: model.extra", "(7,), not (48,)"):
        assert part in str(caught.value)


def test_multi_token_prediction_layers_are_not_read(
    tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """The files of Qwen3-Next and Qwen3.5 have them, under a prefix of their own."""
    directory, _ = tiny_model("qwen3_5", **DELTA_NET)
    more = {"mtp.fc.weight": torch.ones(48, 96), "mtp.layers.0.mlp.up_proj.weight": torch.ones(80, 48)}
    (tokens,) = prompts(20)
    alone = step(make_runner(directory), [tokens], [(0, 0, 20)])
    found = step(make_runner(_with_tensors(directory, tmp_path, more)), [tokens], [(0, 0, 20)])
    torch.testing.assert_close(found, alone)


def test_a_head_under_another_prefix_is_not_taken_for_a_tied_one(
    tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    directory, model = tiny_model("llama")
    changes = {"lm_head.weight": None, "model.lm_head.weight": model.lm_head.weight.detach()}
    with pytest.raises(SpecError, match=r"missing: lm_head.weight; not expected: model.lm_head.weight"):
        make_runner(_with_tensors(directory, tmp_path, changes))


def test_error_names_truncated_file(tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path) -> None:
    directory, _ = tiny_model("llama")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SpecError, match=r"model\.safetensors: not readable as safetensors"):
        make_runner(tmp_path)


@pytest.mark.parametrize(("family", "dtype"), [("mixtral", "bfloat16"), ("llama", "float32")])
def test_deterministic_is_rejected_if_unsupported(tiny_model: MakeModel, family: str, dtype: str) -> None:
    directory, _ = tiny_model(family)
    config = EngineConfig(model_dir=directory, dtype=dtype, num_blocks=1, deterministic=True)
    with pytest.raises(SpecError, match="engine: deterministic"):
        ModelRunner(config)


def test_a_model_without_adapters_refuses_them(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    runner = make_runner(tiny_model("llama")[0])
    config = SchedulerConfig(max_batch_tokens=64, max_running=4, max_waiting=4)
    request = SequenceRequest(id="r", token_ids=(1, 2, 3), num_prompt_tokens=3, adapter="polite")
    prompt = Prompt(Sequence(request, 0, model="m", block_size=8, max_context=96))
    engine = Engine(runner, sample, BlockManager(96), config, block_size=8)
    with pytest.raises(RequestError, match="the model has no adapter 'polite'"):
        engine.add(prompt)
    assert engine.num_waiting == 0
    engine = Engine(runner, sample, BlockManager(96), config, block_size=8, adapters={"polite": 4})
    engine.add(prompt)
    with pytest.raises(RequestError, match="the model has no adapter 4"):
        engine.step()
