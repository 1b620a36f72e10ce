"""Program: runs draft heads beside a small model on an absent GPU, and prints the launches.

python -m tests.engine.kernels.compiled_heads 9.0 medusa eagle …
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# ruff: isort: off
from tests.engine.kernels.absent_gpu import DEVICE, Launch, print_launches
from tests.engine.kernels.compiled_steps import FakeCheckpoint, call_again, without_numbers

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from core.model.draft_heads import HeadsPlace
from engine.batch.batch import Batch, DeviceTokens
from engine.batch.rows import Row
from engine.runner import runner as runner_module
from engine.config import EngineConfig
from engine.spec_decode.heads import open_heads
from engine.spec_decode.heads.head_row import HeadLogits, HeadRow
from engine.runner.runner import ModelRunner
from engine.scheduler.step_commands import Orders
from engine.weights.open_checkpoint import open_checkpoint
from tests.engine.spec_decode.heads.eagle1_files import write_eagle1
from tests.engine.spec_decode.heads.head_files import write_eagle, write_medusa
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.tiny_models import random_model, tiny_config
# ruff: isort: on

BLOCK_SIZE, MAX_ROWS = 16, 8
_LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16}
_WRITERS: dict[str, Callable[[Path], object]] = {
    "medusa": write_medusa,
    "eagle": write_eagle,
    "eagle1": write_eagle1,
    "mtp": lambda directory: write_mtp(directory, **_LATENT),
    "mtp/deepseek_v32": lambda directory: write_mtp(directory, family="deepseek_v32", **_LATENT, index_head_dim=32),
}


def run(kind: str, launches: list[Launch]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        heads_dir, model_dir = Path(directory) / "heads", Path(directory) / "model"
        heads_dir.mkdir()
        with unset_fake_temporarily():
            _WRITERS[kind](heads_dir)
            if kind.startswith("mtp"):
                model_dir = heads_dir
            else:
                random_model(tiny_config("llama")).save_pretrained(model_dir)
        take_steps(model_dir, "eagle" if kind == "eagle1" else kind.split("/")[0], heads_dir, launches)


def take_steps(model_dir: Path, kind: Any, heads_dir: Path, launches: list[Launch]) -> None:
    """Run prompts, replayed and other steps, and drafts."""
    config = EngineConfig(
        model_dir=model_dir,
        block_size=BLOCK_SIZE,
        num_blocks=64,
        device=str(DEVICE),
        max_running=MAX_ROWS,
        recorded_rows=MAX_ROWS,
        heads=HeadsPlace(kind, heads_dir),
    )
    runner = ModelRunner(config, capture=call_again)
    assert runner.heads and runner._recorded

    def batch(*spans: tuple[int, int]) -> Batch:
        rows = [
            Row([1] * count, start, [8 * row + i for i in range(8)][: -(-(start + count) // BLOCK_SIZE)], count)
            for row, (start, count) in enumerate(spans)
        ]
        return Batch.of(rows, block_size=BLOCK_SIZE)

    runner.warm_up(256)
    warm, written_layers = len(launches), list[int]()
    runner.forward(batch((0, 40), (0, 17)))
    runner.forward(batch((40, 24)), on_layer=written_layers.append)
    assert written_layers == list(range(runner.layout.num_layers))
    runner.forward(batch((40, 1), (31, 1)))
    chosen = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    device_tokens = DeviceTokens(token_ids=chosen, sources=np.arange(2), places=np.arange(2))
    runner.forward(replace(batch((41, 1), (32, 1)), device_tokens=device_tokens))
    runner.forward(batch((42, 4), (33, 2)))
    runner.copy(Orders(copies=[(1, 5)]))

    def choose(logits: HeadLogits, rows: Sequence[int], place: int) -> list[int]:
        assert logits.values_RD.is_cuda and (logits.ids_D is None or logits.ids_D.is_cuda)
        return [0] * len(rows)

    runner.draft([HeadRow(1, 43, list(range(8))), HeadRow(1, 34, list(range(8, 16)))], 3, choose)
    assert len(launches) == warm, f"kernels compiled after the warm-up: {[launch.name for launch in launches[warm:]]}"


if __name__ == "__main__":
    without_numbers()
    runner_module.open_model = lambda directory, config: FakeCheckpoint(open_checkpoint(directory).shapes)
    open_heads.open_checkpoint = lambda directory: FakeCheckpoint(open_checkpoint(directory).shapes)
    # Loading inspects values of the checkpoint.
    FakeTensor.__int__ = lambda tensor: 0
    print_launches(run)
