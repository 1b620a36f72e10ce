"""What one rank's engine is made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from core.model import config as model_config
from core.model.draft_heads import HeadsConfig, HeadsPlace, load_heads
from core.model.shape import ModelConfig
from core.types.errors import SpecError
from engine.kv.layout import KVLayout

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How a model is computed, and the memory for its KV: the same on every rank of a replica."""

    model_dir: Path  # Hugging Face's files
    device: str = "cpu"  # as torch names it
    dtype: str = "bfloat16"  # of weights and activations
    weights: str = "as_stored"  # one of engine.layers.shards.WEIGHTS
    pool_dtype: str = "auto"  # of KV; auto: as dtype; or int8, fp8_e4m3
    block_size: int = 16  # tokens
    num_blocks: int | None = None  # of this rank's pool; None: as many as fit into kv_memory_gib
    kv_memory_gib: float | None = None  # None: 1 on a CPU, on a GPU all that nothing else needs
    max_context: int | None = None  # of a sequence; None: the model's
    # Where num_blocks is None on a GPU, what nothing else needs is known by trying the largest step:
    max_batch_tokens: int = 2048  # of a step
    max_running: int = 64  # rows of a step
    link_bytes: int = 0  # that the links of this rank will take of its GPU
    draft_bytes: int = 0  # that a model which drafts will take of it
    expert_parallel: bool = False  # each rank holds some experts whole, instead of a share of every one
    redundant_experts: int = 0  # of each layer: places for further copies of the experts that are chosen most
    deterministic: bool = False  # refuse to compute in a way in which a row's bits depend on the rows beside it
    heads: HeadsPlace | None = None  # on the model's hidden states; None: there are none
    recorded_rows: int = 0  # record decode steps of up to so many rows, where they can be, and replay them

    def layout(self, *, tensor_parallel: int = 1) -> KVLayout:
        """The KV layout on each of so many ranks. Reads the model's config.json; raises SpecError."""
        config = model_config.load(self.model_dir)
        config.check_tensor_parallel(tensor_parallel)
        heads = self.load_heads(config)
        num_draft_layers = heads.num_kv_layers if heads else 0
        itemsize: int = getattr(torch, self.dtype).itemsize
        return KVLayout(
            model=model_config.fingerprint(self.model_dir),
            num_layers=config.num_layers + num_draft_layers,
            draft=heads.fingerprint if heads and num_draft_layers else "",
            num_draft_layers=num_draft_layers,
            feature_bytes=heads.feature_bytes(config, itemsize=itemsize) if heads else 0,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.kv_dim,
            num_sides=config.kv_sides,
            exact_dim=config.kv_exact_dim,
            block_size=self.block_size,
            dtype=self.dtype if self.pool_dtype == "auto" else self.pool_dtype,
            tensor_parallel=tensor_parallel,
            weights=self.weights,
        )

    def bytes_beside_blocks(self, layout: KVLayout) -> int:
        """What heads keep on a rank of this layout, however many blocks it has. Raises SpecError."""
        model = model_config.load(self.model_dir)
        if (heads := self.load_heads(model)) is None:
            return 0
        itemsize, layer_bytes = getattr(torch, self.dtype).itemsize, layout.layer_bytes
        return heads.bytes_beside_blocks(
            model, itemsize=itemsize, max_running=self.max_running, layer_bytes=layer_bytes
        )

    def load_heads(self, model: ModelConfig) -> HeadsConfig | None:
        """Raises SpecError where what is there does not draft for this model."""
        return load_heads(*self.heads, model) if self.heads else None


def device_for(*, gpus: float) -> torch.device:
    """The device of this process: its first GPU where it has been given one."""
    return torch.device("cuda", 0) if gpus else torch.device("cpu")


def num_blocks_for(layout: KVLayout, *, gib: float, beside: int = 0) -> int:
    """How many blocks of one rank fit into this much memory, and so many bytes beside them. Raises SpecError if none
    does."""
    if gib * GIB - beside < layout.block_bytes:
        heads = f", and {beside} of heads beside it" if beside else ""
        raise SpecError(
            f"kv_memory_gib: {gib} GiB hold no block of {layout.block_size} tokens: {layout.block_bytes} bytes{heads}"
        )
    return (int(gib * GIB) - beside) // layout.block_bytes
