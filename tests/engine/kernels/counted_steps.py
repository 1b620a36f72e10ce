"""Program: counts the launches of a large model's layers in a decode step on an absent GPU, and prints JSON.

python -m tests.engine.kernels.counted_steps llama qwen3_moe …
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

# ruff: isort: off
from tests.engine.kernels.absent_gpu import DEVICE, absent_gpu
from tests.engine.kernels.compiled_steps import CONFIGS, NUM_BLOCKS, FakeCheckpoint

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from core.model import config as model_config
from engine.batch.device_batch import DeviceBatch
from engine.config import EngineConfig
from engine.kernels.attention.query_groups import QueryGroups
from engine.runner.runner import ModelRunner
# ruff: isort: on

ROWS = 64
LAYERS = {"num_hidden_layers": 4}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 1536,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
FAMILIES = CONFIGS | {"deepseek_v3": CONFIGS["deepseek_v2"] | DEEPSEEK_V3}
_LAUNCH_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "device"}


class Counted(TorchDispatchMode):
    """Records the names of operations that torch launches."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self._launched = launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _LAUNCH_NOTHING:
            self._launched.append(name)
        return func(*args, **(kwargs or {}))


def main() -> None:
    model_config.fingerprint = lambda model_dir, **context: "without numbers"
    for family in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(FAMILIES[family] | LAYERS))
            print(json.dumps({"family": family, "layers": layers(Path(directory))}), flush=True)


def layers(model_dir: Path) -> list[list[str]]:
    """Return the names of launches between each layer's KV write and the next one's."""
    launched: list[str] = []
    stored: list[int] = []
    with absent_gpu((9, 0)), torch.inference_mode():
        JITFunction.run = lambda self, *arguments, **options: launched.append(self.__name__)
        config = EngineConfig(model_dir=model_dir, num_blocks=NUM_BLOCKS, device=str(DEVICE))
        runner = ModelRunner(config, checkpoint=FakeCheckpoint.of(model_dir))

        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=DEVICE)

        of_query_groups = (numbers(ROWS), numbers(ROWS), numbers(ROWS, 256), *(numbers(ROWS) for _ in range(3)))
        query_groups = QueryGroups.of(of_query_groups, most=runner._model.most_queries, longest=4096)
        batch = DeviceBatch(numbers(ROWS), numbers(ROWS), numbers(ROWS), None, query_groups, prompts=None)
        with Counted(launched):
            runner._model.compute(batch, runner.pool, lambda layer: stored.append(len(launched)))
    return [launched[begin:end] for begin, end in pairwise(stored)]


if __name__ == "__main__":
    main()
