"""Program: counts the launches of a model's layers in a recorded decode step on an absent GPU, and prints JSON.

Fails if the step copies from or to the host, or depends on values on the device.

python -m tests.engine.kernels.counted_steps large/qwen3_moe "qwen2, some layers slide" …
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

# ruff: isort: off
from tests.engine.kernels.absent_gpu import DEVICE, Recording, absent_gpu
from tests.engine.kernels.compiled_steps import CONFIGS, NUM_BLOCKS, FakeCheckpoint

import torch
from triton.runtime.jit import JITFunction

from core.model import config as model_config
from engine.batch.device_batch import DeviceBatch
from engine.config import EngineConfig
from engine.kernels.attention.queries import QueryGroups
from engine.kernels.recurrent.state_slots import StateSlots
from engine.kv.pool import KVPool
from engine.model.recurrent_layer import StepStates
from engine.runner.runner import ModelRunner
from tests.engine.model.test_models import FAMILIES
from tests.engine.tiny_models import tiny_config
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
LARGE = CONFIGS | {"deepseek_v3": CONFIGS["deepseek_v2"] | DEEPSEEK_V3}


def main() -> None:
    model_config.fingerprint = lambda model_dir, **context: "without numbers"
    for family in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            write_config(family, Path(directory))
            print(json.dumps({"family": family, "layers": layers(Path(directory))}), flush=True)


def write_config(family: str, model_dir: Path) -> None:
    """Write the config of a large model, or of a tiny one of any family."""
    size, _, name = family.rpartition("/")
    if size == "large":
        (model_dir / "config.json").write_text(json.dumps(LARGE[name] | LAYERS))
    else:
        architecture, changes = FAMILIES[family]
        tiny_config(architecture, **changes).save_pretrained(model_dir)


def layers(model_dir: Path) -> list[list[str]]:
    """Return the names of launches between each layer's KV write and the next one's, in bf16.

    The launches before the first and after the last write are in front and at the end.
    """
    launched: list[str] = []
    stored: list[int] = []
    with absent_gpu((9, 0)), torch.inference_mode():
        JITFunction.run = lambda self, *arguments, **options: launched.append(self.__name__)
        config = EngineConfig(model_dir=model_dir, dtype="bfloat16", num_blocks=NUM_BLOCKS, device=str(DEVICE))
        runner = ModelRunner(config, checkpoint=FakeCheckpoint.of(model_dir))
        assert runner._model.hindrance is None, runner._model.hindrance

        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=DEVICE)

        of_query_groups = (numbers(ROWS), numbers(ROWS), numbers(ROWS, 256), *(numbers(ROWS) for _ in range(3)))
        query_groups = QueryGroups.of(of_query_groups, most=runner._model.most_queries, longest=4096)
        batch = DeviceBatch(numbers(ROWS), numbers(ROWS), numbers(ROWS), None, query_groups, prompts=None)
        with Recording(launched):
            runner._model.compute(
                batch, runner.pool, lambda layer: stored.append(len(launched)), states=states_of(runner.pool)
            )
    return [launched[begin:end] for begin, end in pairwise([0, *stored, len(launched)])]


def states_of(pool: KVPool) -> StepStates | None:
    """Return the slots of a step with one token per row; None for a model without recurrent layers."""
    starts_S1, read_S, write_T = (
        torch.empty(count, dtype=torch.int64, device=DEVICE) for count in (ROWS + 1, ROWS, ROWS)
    )
    return StepStates(pool, StateSlots(starts_S1, read_S, write_T, max_query_len=1)) if pool.states else None


if __name__ == "__main__":
    main()
