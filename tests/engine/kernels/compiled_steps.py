"""Program: runs steps of large models on an absent GPU, and prints the launches as JSON.

python -m tests.engine.kernels.compiled_steps 9.0 llama/auto qwen3_moe/int8 …
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

# ruff: isort: off
from tests.engine.kernels.absent_gpu import DEVICE, Launch, Recording, print_launches

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from core.model import config as model_config
from core.types.request import Sampling
from core.types.request import TokenRules
from engine.runner import decode_graphs, runner, streams
from engine.sampling import greedy, sampler
from engine.batch import device_batch
from engine.batch.batch import Batch, DeviceTokens
from engine.batch.rows import Row
from engine.attention import triton_heads
from engine.model.transformer import expected_tensors
from engine.config import GIB, EngineConfig
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.sampling.params import SamplingRow
# ruff: isort: on

NUM_BLOCKS, BLOCK_SIZE, MAX_RUNNING = 20000, 16, 64

COMMON = {
    "vocab_size": 32000,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # 3 8B
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
    },
    # 30B-A3B
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    # 80B-A3B
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    # 3 Nano 30B-A3B
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    },
    # Lite
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
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
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
}
CONFIGS["deepseek_v3"] = CONFIGS["deepseek_v2"] | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 1536,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
# One of eight ranks.
CONFIGS["deepseek_v32"] = CONFIGS["deepseek_v3"] | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
CONFIGS = {family: COMMON | {"model_type": family} | config for family, config in CONFIGS.items()}


class FakeCheckpoint:
    """Implements Checkpoint with tensors without data."""

    unindexed = ()

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    @classmethod
    def of(cls, model_dir: Path) -> FakeCheckpoint:
        return cls(expected_tensors(model_config.load(model_dir)))

    def is_quantized(self, name: str) -> bool:
        return False

    def quantized(self, name: str, **_: Any) -> None:
        """Return None: all tensors are plain."""

    def read(self, name: str, *, rows: Any = None, columns: Any = None) -> Tensor:
        cuts = (rows, columns, *[None] * len(self.shapes[name]))
        shape = [cut[1] - cut[0] if cut else size for size, cut in zip(self.shapes[name], cuts, strict=False)]
        return torch.empty(shape, dtype=torch.bfloat16)


class AbsentStreams:
    """Streams of the absent device: uploads keep their shape, and waits return at once."""

    def page_locked(self, size: int, dtype: torch.dtype) -> Any:
        numbers = np.empty(size)
        return SimpleNamespace(numpy=lambda: numbers, size=size, dtype=dtype)

    def upload(self, host: Any) -> Tensor:
        return torch.empty(host.size, dtype=host.dtype, device=DEVICE)

    def synchronize(self) -> None:
        pass


class AbsentGauge:
    """Memory gauge of the absent device: everything fits and nothing is allocated."""

    total = 80 * GIB

    def free(self) -> int:
        return self.total

    def allocated(self) -> int:
        return 0

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        return 0


def run(case: str, launches: list[Launch]) -> None:
    family, pool_dtype = case.split("/")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIGS[family]))
        take_steps(Path(directory), pool_dtype, launches)


def without_numbers() -> None:
    """Patch uploads to keep shapes only, aligned like an allocation."""
    for module in (device_batch, decode_graphs, triton_heads, greedy, sampler):
        module.upload = lambda arrays, device: [torch.empty(a.shape, dtype=torch.int32, device=device) for a in arrays]
    streams.streams_of = lambda device: AbsentStreams()
    sampler._place = lambda values, dtype, device: torch.empty(np.shape(values), dtype=dtype, device=device)
    sampler.download = lambda tensors: lambda: [np.zeros(tensor.shape, dtype=int) for tensor in tensors]


def take_steps(model_dir: Path, pool_dtype: str, launches: list[Launch]) -> None:
    """Run every kind of step of a replica of either role."""
    config = EngineConfig(
        model_dir=model_dir,
        pool_dtype=pool_dtype,
        block_size=BLOCK_SIZE,
        device=str(DEVICE),
        max_batch_tokens=2048,
        max_running=MAX_RUNNING,
        recorded_rows=MAX_RUNNING,
    )
    layout = config.layout()
    kv_gib = ((NUM_BLOCKS + 0.5) * layout.block_bytes + 2 * MAX_RUNNING * layout.state_bytes) / GIB
    replaying = ModelRunner(replace(config, kv_memory_gib=kv_gib), capture=call_again, gauge=AbsentGauge())
    assert replaying.pool.num_blocks == NUM_BLOCKS
    assert replaying._recorded is not None, replaying._model.hindrance
    replaying.warm_up(2048)
    warm, written_layers = len(launches), list[int]()
    for spans, options in (
        # A chunk that is shipped.
        ([(0, 2048)], {"on_layer": written_layers.append}),
        # A replayed step.
        ([(4095, 1)] * 5, {}),
        # Prompts beside running rows.
        ([(100, 300), (4095, 1), (512, 512), (700, 1)], {}),
    ):
        blocks = iter(np.arange(NUM_BLOCKS))
        rows = [
            Row(
                token_ids=[1] * count,
                start=start,
                blocks=[next(blocks) for _ in range(-(-(start + count) // BLOCK_SIZE))],
                num_logits=1,
            )
            for start, count in spans
        ]
        batch = Batch.of(rows, block_size=BLOCK_SIZE)
        logits = replaying.forward(batch, **options)
        assert logits.shape == (len(spans), 32000) and logits.is_cuda
        chosen = choose(logits)
        # The next step, launched ahead of these tokens.
        for sources in ([0, 1], [1, 0]) if len(spans) > 1 else ():
            device_tokens = DeviceTokens(token_ids=chosen, sources=np.array(sources), places=np.array([0, 1]))
            replaying.forward(replace(batch, device_tokens=device_tokens), **options)
    assert written_layers == list(range(layout.num_layers))
    assert len(launches) == warm, f"kernels compiled after the warm-up: {[launch.name for launch in launches[warm:]]}"


def call_again(step: Callable[[], None]) -> Callable[[], None]:
    """Stand-in for graph capture, in which nothing may be copied from host memory."""
    with Recording([]):
        step()
    return step


def choose(logits: Tensor) -> Tensor:
    """Sample as a worker does: the host reads only the final result from the device."""
    samplings = (
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.1, num_logprobs=2),
        Sampling(temperature=1.0, repetition_penalty=1.1, presence_penalty=0.5),
        Sampling(temperature=1.0, min_tokens=5, stop_token_ids=(7,)),
        Sampling(token_rules=TokenRules(logit_bias=((7, 1.0),), allowed_token_ids=(7, 9), bad_words=((3, 9),))),
    )
    rows = [
        SamplingRow(sampling=sampling, seed=1, tokens=[1, 2, 3], num_prompt_tokens=2)
        for _, sampling in zip(logits, cycle(samplings), strict=False)
    ]
    with numbers_awaited() as awaited:
        sampled = sample(logits, rows)
    assert not awaited and sampled.token_ids.shape == (len(rows),), awaited
    assert len(sampled.wait()) == len(rows)
    return cast(Tensor, sampled.token_ids)


@contextmanager
def numbers_awaited() -> Iterator[list[Sequence[int]]]:
    """Yield the shapes of the tensors whose values the host reads; all values are zero."""
    shapes: list[Sequence[int]] = []

    def tolist(x: Tensor) -> Any:
        shapes.append(tuple(x.shape))
        return np.zeros(x.shape, dtype=int).tolist()

    original = FakeTensor.tolist
    FakeTensor.tolist = tolist
    try:
        yield shapes
    finally:
        FakeTensor.tolist = original


if __name__ == "__main__":
    without_numbers()
    runner.open_model = lambda directory, config: FakeCheckpoint.of(directory)
    model_config.fingerprint = lambda model_dir, **context: "without numbers"
    print_launches(run)
