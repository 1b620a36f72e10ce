"""What the matrices of a model are multiplied with when it reads a text: what rounding wants to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from core.model import config as model_config
from core.types.errors import SpecError
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.kv.pool import KVPool
from engine.layers.layers import Before, Matrix
from engine.layers.shards import ShardReader
from engine.model.transformer import Transformer
from engine.runner.parallel import TensorParallel
from engine.weights.open_checkpoint import open_checkpoint

# T tokens, I input features, O output features

_BLOCK_SIZE = 16
_DTYPE = "float32"
_PROMPT, _TOKENS = 256, 8192  # several times as many tokens as a matrix has inputs would be better, and slower


def inputs_of_text(model_dir: Path, text: str) -> dict[str, Tensor]:
    """As `inputs_of`, over the first tokens of a text. Raises SpecError if it is too short to say anything."""
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    prompts = [ids[start : start + _PROMPT] for start in range(0, min(len(ids), _TOKENS), _PROMPT)]
    if len(ids) < _PROMPT:
        raise SpecError(f"a text to calibrate with needs {_PROMPT} tokens or more; this one has {len(ids)}")
    return inputs_of(model_dir, prompts)


def inputs_of(model_dir: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The sum of x x^T, (I, I) fp32, over each matrix's inputs while prompts are read; by names without `.weight`.

    On the CPU, in fp32. Every distinct input has such a sum, together twice the model's size and more.
    """
    config = model_config.load(model_dir)
    layout = EngineConfig(model_dir=model_dir, dtype=_DTYPE, block_size=_BLOCK_SIZE).layout()
    device, seen = torch.device("cpu"), _Seen({})
    reader = ShardReader(
        open_checkpoint(model_dir), TensorParallel(), getattr(torch, _DTYPE), device, on_matrix=seen.observe
    )
    with torch.inference_mode():
        model = Transformer(config, reader, layout, on_read=lambda layer: None)
        longest = max(len(prompt) for prompt in prompts)
        pool = KVPool(layout, num_blocks=-(-longest // _BLOCK_SIZE), device=device)
        for prompt in prompts:
            row = Row(token_ids=prompt, start=0, blocks=range(pool.num_blocks), num_logits=0)
            model(Batch.of([row], block_size=_BLOCK_SIZE), pool, lambda layer: None)
    return {name: matrix.gram_II for name, matrix in seen.matrices.items() if matrix.gram_II is not None}


@dataclass(frozen=True)
class _Seen:
    matrices: dict[str, _Observed]

    def observe(self, names: Sequence[str], matrix: Matrix) -> Matrix:
        observed = _Observed(matrix)
        self.matrices.update(dict.fromkeys(names, observed))
        return observed


@dataclass
class _Observed:
    """Implements engine.layers.layers.Matrix."""

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
