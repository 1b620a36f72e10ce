"""Models of known shapes with random weights, generated on the device when read, for checks and benchmarks.

Nothing is downloaded, and only a config.json is written. The numbers are seeded by tensor names, so the ranks of a
gang, and two runners of one shape, have the same weights.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from core.model import config as model_config
from core.model.draft_heads import HeadsPlace
from core.types.errors import SpecError
from engine.config import EngineConfig
from engine.model.transformer import expected_tensors
from engine.runner.parallel import TensorParallel
from engine.runner.runner import ModelRunner
from engine.weights.checkpoint import Shape, Span
from engine.weights.quantized_weight import QuantizedWeight

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    # The share of one of eight tensor-parallel ranks.
    "llama-70b-tp8-slice": _LLAMA
    | {
        "vocab_size": 128256 // 8,
        "hidden_size": 8192,
        "intermediate_size": 28672 // 8,
        "num_hidden_layers": 80,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
    },
}


def random_runner(
    shape: str,
    *,
    dtype: str = "bfloat16",
    pool_dtype: str = "auto",
    num_blocks: int = 4096,
    recorded_rows: int = 0,
    heads: HeadsPlace | None = None,
    device: str = "cuda",
    parallel: TensorParallel | None = None,
    changes: Mapping[str, Any] | None = None,
) -> ModelRunner:
    """Return a runner for one of SHAPES with random weights and `num_blocks` blocks. Raises SpecError.

    recorded_rows, heads: see EngineConfig. changes: of the shape's config.json, such as `{"num_hidden_layers": 2}`.
    """
    if shape not in SHAPES:
        raise SpecError(f"shape {shape} not found; available: {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps({**SHAPES[shape], **(changes or {})}))
        # The layout's name is a hash of the files' bytes; there are none.
        (directory / "model.safetensors").touch()
        config = EngineConfig(
            model_dir=directory,
            device=device,
            dtype=dtype,
            pool_dtype=pool_dtype,
            num_blocks=num_blocks,
            recorded_rows=recorded_rows,
            heads=heads,
        )
        checkpoint = RandomCheckpoint(directory, getattr(torch, dtype), torch.device(device))
        return ModelRunner(config, parallel, checkpoint=checkpoint)


class RandomCheckpoint:
    """Checkpoint with random tensors for a config.json."""

    unindexed = ()

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._shapes = expected_tensors(model_config.load(model_dir))

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """Return random values: norms near 1, biases near 0, matrix rows of length 1, which keeps feature sizes."""
        shape = self._shapes[name]
        generator = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        numbers = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return numbers.mul_(0.1).add_(0.0 if name.endswith("bias") else 1.0)[slice(*rows or (None,))]
        numbers = numbers[slice(*rows or (None,)), slice(*columns or (None,))]
        return numbers if name == "model.embed_tokens.weight" else numbers.mul_(shape[-1] ** -0.5)

    def is_quantized(self, name: str) -> bool:
        return False

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> QuantizedWeight | None:
        return None
