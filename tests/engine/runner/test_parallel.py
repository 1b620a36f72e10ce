"""Tensor parallelism over Gloo in real processes: every rank gets the logits that one rank computes alone."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from core.types.errors import ReplicaLost, SpecError
from engine.config import EngineConfig
from engine.runner.parallel import TensorParallel
from tests.engine import gang
from tests.engine.gang import StartGang
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DELTA_NET,
    DELTA_NET_MOE,
    GEMMA4,
    GEMMA4_MOE,
    GLM4_MOE,
    GLM_MOE_DSA,
    GPT_OSS,
    GRANITE_HYBRID,
    LFM2,
    LLAMA4,
    MINIMAX_M2,
    MISTRAL4,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    MakeModel,
    reference_logits,
)

TIMEOUT_S = 40.0


MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN2_MOE = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "num_experts": 6}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
LATENT_EXPERTS = NEMOTRON_H_MOE | {"moe_latent_size": 36}


@pytest.mark.parametrize(
    ("size", "family", "changes"),
    [
        (2, "llama", {"attention_bias": True, "mlp_bias": True}),
        (2, "qwen2", {"tie_word_embeddings": True}),
        (4, "qwen3", {}),  # 2 kv heads, each on two ranks
        (4, "olmo2", {}),
        (3, "llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}),  # SmolLM2's heads
        (4, "llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        (2, "deepseek_v2", DEEPSEEK_V2 | {"attention_bias": True}),
        (4, "deepseek_v3", DEEPSEEK_V3),
        (2, "deepseek_v32", DEEPSEEK_V32),
        (4, "glm_moe_dsa", GLM_MOE_DSA | {"index_topk": 8}),
        (2, "minimax_m2", MINIMAX_M2),  # norms over the heads of all ranks
        (4, "minimax_m2", MINIMAX_M2),
        (2, "gpt_oss", GPT_OSS),  # a sink per query head; experts with biases
        (4, "gpt_oss", GPT_OSS),
        (2, "gemma4", GEMMA4),  # 2 kv heads or 1, and layers without
        (4, "gemma4", GEMMA4),
        (2, "gemma4", GEMMA4_MOE),
        (2, "llama4", LLAMA4),
        (2, "glm4_moe", GLM4_MOE),
        (4, "mistral4", MISTRAL4),
        (2, "phi3", {"head_dim": ...}),  # fused projections
        (2, "mixtral", MIXTRAL),
        (2, "qwen2_moe", QWEN2_MOE),
        (2, "nemotron_h", LATENT_EXPERTS),
        (4, "nemotron_h", NEMOTRON_H | {"use_bias": True}),
        (4, "granite_hybrid", GRANITE_HYBRID),
        (4, "qwen3_next", DELTA_NET_MOE),
        (4, "qwen3_5", DELTA_NET),
        (4, "lfm2", LFM2 | {"conv_bias": True}),
    ],
)
def test_logits_do_not_depend_on_the_number_of_ranks(
    size: int, family: str, changes: dict[str, Any], tiny_model: MakeModel, start_gang: StartGang
) -> None:
    check_ranks(start_gang, size, *tiny_model(family, **changes))


@pytest.mark.parametrize(
    ("size", "family", "changes"),
    [
        (2, "qwen3_moe", QWEN3_MOE),
        (2, "deepseek_v3", DEEPSEEK_V3),
        # Ranks with 1 and with 2 experts; steps with fewer tokens than ranks.
        (4, "mixtral", MIXTRAL),
        (4, "gpt_oss", GPT_OSS),
        (2, "llama4", LLAMA4),  # weighs the experts' inputs
        (2, "gemma4", GEMMA4_MOE),
        (2, "nemotron_h", LATENT_EXPERTS),
    ],
)
def test_logits_do_not_depend_on_expert_placement(
    size: int, family: str, changes: dict[str, Any], tiny_model: MakeModel, start_gang: StartGang
) -> None:
    check_ranks(start_gang, size, *tiny_model(family, **changes), expert_parallel=True)


def check_ranks(
    start_gang: StartGang,
    size: int,
    directory: Path,
    model: PreTrainedModel,
    *,
    expert_parallel: bool = False,
    tolerance: float = 2e-4,
) -> None:
    """Check that every rank computes transformers' logits, and all the same bits: each chooses the next token."""
    sequences = prompts(30, 9, 17)
    expected = [reference_logits(model, sequence) for sequence in sequences]
    ranks = start_gang(size, gang.logits_in_three_steps, directory, sequences, expert_parallel)
    results = [rank.result(TIMEOUT_S) for rank in ranks]
    for chunk_logits, prompt_logits, token_logits in results:
        assert chunk_logits.shape == (0, VOCAB_SIZE)
        for found, at in ((prompt_logits, -2), (token_logits, -1)):
            wanted = torch.stack([logits[at] for logits in expected])
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
        assert torch.equal(token_logits, results[0][2])


def test_a_gang_replays_what_one_rank_computes(tiny_model: MakeModel, start_gang: StartGang) -> None:
    """The recorded steps include sums and gathers, and all ranks pad to the same size."""
    directory, _ = tiny_model("llama")
    (alone,), gang_of_two = (start_gang(size, gang.replayed_steps, directory) for size in (1, 2))
    expected, _ = alone.result(TIMEOUT_S)
    for logits, num_replays in (rank.result(TIMEOUT_S) for rank in gang_of_two):
        assert num_replays == 4
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_broadcasts_of_every_size(start_gang: StartGang) -> None:
    messages = [bytes(range(256))[:n] * repeat for n, repeat in [(0, 1), (1, 1), (8, 1), (255, 16), (256, 900)]]
    messages += [bytes(8 * n) for n in (509, 510, 511, 512, 513)]  # around the size of the first frame
    ranks = start_gang(3, gang.broadcasts, messages)
    assert [rank.result(TIMEOUT_S) for rank in ranks] == [messages] * 3


def test_one_rank_needs_no_network() -> None:
    alone = TensorParallel()
    x = torch.ones(3)
    assert alone.all_reduce(x) is x and alone.all_gather(x, 3) is x
    assert alone.broadcast_bytes(b"abc") == b"abc"
    assert alone.span(7) == (0, 7)


def test_spans_cover_everything_once() -> None:
    for size in range(1, 9):
        spans = [TensorParallel(rank=rank, size=size).span(131) for rank in range(size)]
        assert [start for start, _ in spans] == [0] + [end for _, end in spans[:-1]] and spans[-1][1] == 131
        assert max(e - s for s, e in spans) - min(e - s for s, e in spans) <= 1


def test_unsupported_sizes_are_rejected(tiny_model: MakeModel) -> None:
    directory, _ = tiny_model("llama")
    with pytest.raises(SpecError, match="choose one of 1, 2, 4"):
        EngineConfig(model_dir=directory).layout(tensor_parallel=3)


def test_join_times_out_without_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(ReplicaLost, match="rank 0: not all 2 ranks were there"):
        gang.join(tmp_path / "store", "nobody-comes", 0, 2, timeout_s=0.5)


def test_dead_rank_raises_replica_lost(start_gang: StartGang) -> None:
    first, second, dead = start_gang(3, gang.wait_for_dying_rank, timeout_s=5.0)
    assert isinstance(dead.exception(TIMEOUT_S), BrokenProcessPool)
    for survivor in (first, second):
        assert "ReplicaLost" in survivor.result(TIMEOUT_S) and "another rank is gone" in survivor.result(0)
