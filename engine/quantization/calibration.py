"""Calibration statistics: Gram matrices of the inputs of a model's matrices over a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.model import config as model_config
from core.model.shape import ModelConfig
from core.model.tokenizer_file import open_tokenizer
from core.types.errors import SpecError
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.kv.pool import KVPool
from engine.layers.layers import Before, Matrix
from engine.layers.shards import OnMatrix, ShardReader
from engine.model.transformer import Transformer
from engine.runner.parallel import TensorParallel
from engine.weights.checkpoint import Checkpoint
from engine.weights.open_checkpoint import open_model

# T tokens, I input features, O output features

_BLOCK_SIZE = 16
# Tokens per prompt, and of all prompts. More would be more accurate but slower.
_PROMPT, _TOKENS = 256, 8192


def inputs_of_text(model_dir: Path, text: str, say: Callable[[str], None] = lambda line: None) -> dict[str, Tensor]:
    """Return `inputs_of` over the first tokens of a text. Raises SpecError if the text is too short."""
    return inputs_of(model_dir, prompts_of_text(model_dir, text, length=_PROMPT, num_tokens=_TOKENS), say)


def inputs_of(
    model_dir: Path, prompts: Sequence[Sequence[int]], say: Callable[[str], None] = lambda line: None
) -> dict[str, Tensor]:
    """Return the sum of x x^T, (I, I) fp32, over each matrix's inputs; keyed by tensor name without `.weight`.

    say: receives lines of progress. Runs on the CPU in fp32. The sums take about twice a dense bf16 model's memory.
    """
    config, observed = model_config.load(model_dir), dict[str, _Observed]()

    def observe(names: Sequence[str], matrix: Matrix) -> Matrix:
        one = _Observed(matrix)
        observed.update(dict.fromkeys(names, one))
        return one

    with torch.inference_mode():
        checkpoint = open_model(model_dir, config)
        model, pool = open_in_fp32(model_dir, config, checkpoint, prompts, on_matrix=observe)
        for number, prompt in enumerate(prompts, 1):
            model(batch_of(prompt, pool), pool, lambda layer: None)
            say(f"prompt {number} of {len(prompts)} calibrated")
    return {name: matrix.gram_II for name, matrix in observed.items() if matrix.gram_II is not None}


def prompts_of_text(model_dir: Path, text: str, *, length: int, num_tokens: int) -> list[list[int]]:
    """Cut the first `num_tokens` tokens of a text into prompts of `length`. Raises SpecError for a shorter text."""
    ids = open_tokenizer(model_dir).encode(text, add_special_tokens=False).ids
    if len(ids) < length:
        raise SpecError(f"the calibration text has {len(ids)} tokens; at least {length} are needed")
    return [ids[start : start + length] for start in range(0, min(len(ids), num_tokens), length)]


def open_in_fp32(
    model_dir: Path,
    config: ModelConfig,
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    *,
    on_matrix: OnMatrix | None = None,
) -> tuple[Transformer, KVPool]:
    """Read a model in fp32 on the CPU. The pool holds one of the prompts at a time. on_matrix: see ShardReader."""
    layout = EngineConfig(model_dir=model_dir, dtype="float32", block_size=_BLOCK_SIZE).layout()
    device = torch.device("cpu")
    reader = ShardReader(checkpoint, TensorParallel(), torch.float32, device, on_matrix=on_matrix)
    model = Transformer(config, reader, layout, on_read=lambda layer: None)
    longest = max(len(prompt) for prompt in prompts)
    return model, KVPool(layout, num_blocks=-(-longest // _BLOCK_SIZE), device=device)


def batch_of(prompt: Sequence[int], pool: KVPool) -> Batch:
    """Return the step that computes a whole prompt in the pool's first blocks."""
    row = Row(token_ids=prompt, start=0, blocks=range(pool.num_blocks), num_logits=0)
    return Batch.of([row], block_size=pool.layout.block_size)


@dataclass
class _Observed:
    """Matrix that accumulates the Gram matrix of its inputs. Implements engine.layers.layers.Matrix."""

    matrix: Matrix
    gram_II: Tensor | None = None

    @property
    def is_fixed(self) -> bool:
        return False

    def multiply(
        self,
        x_TI: Tensor,
        *,
        bias_O: Tensor | None = None,
        before: Before | None = None,
        residual_TO: Tensor | None = None,
    ) -> Tensor:
        if before is not None:
            x_TI = before(x_TI)
        if self.gram_II is None:
            self.gram_II = torch.zeros(x_TI.shape[1], x_TI.shape[1])
        self.gram_II.addmm_(x_TI.T, x_TI)
        return self.matrix.multiply(x_TI, bias_O=bias_O, residual_TO=residual_TO)
