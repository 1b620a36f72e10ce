"""Calibration statistics: Gram matrices of the inputs of a model's matrices over a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.model import config as model_config
from core.model.tokenizer_file import open_tokenizer
from core.types.errors import SpecError
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.kv.pool import KVPool
from engine.layers.layers import Before, Matrix
from engine.layers.shards import ShardReader
from engine.model.transformer import Transformer
from engine.runner.parallel import TensorParallel
from engine.weights.renamed_checkpoint import open_model

# T tokens, I input features, O output features

_BLOCK_SIZE = 16
_DTYPE = "float32"
# Tokens per prompt, and of all prompts. More would be more accurate but slower.
_PROMPT, _TOKENS = 256, 8192


def inputs_of_text(model_dir: Path, text: str) -> dict[str, Tensor]:
    """Return `inputs_of` over the first tokens of a text. Raises SpecError if the text is too short."""
    ids = open_tokenizer(model_dir).encode(text, add_special_tokens=False).ids
    prompts = [ids[start : start + _PROMPT] for start in range(0, min(len(ids), _TOKENS), _PROMPT)]
    if len(ids) < _PROMPT:
        raise SpecError(f"the calibration text has {len(ids)} tokens; at least {_PROMPT} are needed")
    return inputs_of(model_dir, prompts)


def inputs_of(model_dir: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return the sum of x x^T, (I, I) fp32, over each matrix's inputs; keyed by tensor name without `.weight`.

    Runs on the CPU in fp32. The sums take about twice the memory of a dense bf16 model.
    """
    config = model_config.load(model_dir)
    layout = EngineConfig(model_dir=model_dir, dtype=_DTYPE, block_size=_BLOCK_SIZE).layout()
    device, observer = torch.device("cpu"), _InputObserver({})
    reader = ShardReader(
        open_model(model_dir, config), TensorParallel(), getattr(torch, _DTYPE), device, on_matrix=observer.observe
    )
    with torch.inference_mode():
        model = Transformer(config, reader, layout, on_read=lambda layer: None)
        longest = max(len(prompt) for prompt in prompts)
        pool = KVPool(layout, num_blocks=-(-longest // _BLOCK_SIZE), device=device)
        for prompt in prompts:
            row = Row(token_ids=prompt, start=0, blocks=range(pool.num_blocks), num_logits=0)
            model(Batch.of([row], block_size=_BLOCK_SIZE), pool, lambda layer: None)
    return {name: matrix.gram_II for name, matrix in observer.matrices.items() if matrix.gram_II is not None}


@dataclass(frozen=True)
class _InputObserver:
    """Matrices observed so far, by tensor name."""

    matrices: dict[str, _Observed]

    def observe(self, names: Sequence[str], matrix: Matrix) -> Matrix:
        observed = _Observed(matrix)
        self.matrices.update(dict.fromkeys(names, observed))
        return observed


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
