"""Configuration of one rank's engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from core.model import config as model_config
from core.model.draft_heads import HeadsConfig, HeadsPlace, load_heads
from core.model.kv_memory import PoolSizes, WindowArithmetic
from core.model.shape import ModelConfig
from core.types.errors import SpecError
from engine.kv.basis import fingerprint_of_bases
from engine.kv.layout import KVLayout

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Model, compute options and KV memory; identical on every rank of a replica."""

    model_dir: Path  # in Hugging Face's layout
    device: str = "cpu"  # torch device name
    dtype: str = "bfloat16"  # weights and activations
    weights: str = "auto"  # one of engine.layers.shards.WEIGHTS
    pool_dtype: str = "auto"  # KV: auto (= dtype), int8, fp8_e4m3 or int4
    unquantized_layers: tuple[int, ...] = ()  # layers whose KV is never quantized; negative ones count from the end
    block_size: int = 16  # tokens
    num_blocks: int | None = None  # pool size of this rank; None: as many as fit into kv_memory_gib
    kv_memory_gib: float | None = None  # None: 1 GiB on a CPU, all free memory on a GPU
    max_context: int | None = None  # tokens per sequence; None: the model's limit
    # With num_blocks None on a GPU, a trial of the largest step measures the memory that the rest needs:
    max_batch_tokens: int = 2048  # tokens per step
    max_running: int = 64  # rows per step
    link_bytes: int = 0  # GPU memory reserved for this rank's links
    draft_bytes: int = 0  # GPU memory reserved for a draft model
    expert_parallel: bool = False  # each rank holds whole experts instead of a slice of every expert
    redundant_experts: int = 0  # extra copies of the most used experts, per layer
    deterministic: bool = False  # reject compute paths whose results depend on the other rows of the batch
    heads: HeadsPlace | None = None  # draft heads on the model's hidden states; None: no heads
    # In layers with a window, keep only the blocks that later queries see; see KVLayout.windows. Decided by the spec.
    frees_windows: bool = False
    num_window_parts: int | None = None  # with num_blocks: see KVPool; None: one per block
    recorded_rows: int = 0  # capture decode steps of up to this many rows as graphs, where supported, and replay them

    def layout(self, *, tensor_parallel: int = 1) -> KVLayout:
        """Return the KV layout of one of `tensor_parallel` ranks. Reads the model's config.json; raises SpecError."""
        config = model_config.load(self.model_dir)
        config.check_tensor_parallel(tensor_parallel)
        config.check_kv_dtype("kv.pool_dtype", self.pool_dtype)
        heads = self.load_heads(config)
        num_draft_layers = heads.num_kv_layers if heads else 0
        layers = config.kv_layers + (heads.kv_layers if heads else ())
        num_kv_heads, dims = zip(*layers, strict=True)
        itemsize: int = getattr(torch, self.dtype).itemsize
        return KVLayout(
            model=model_config.fingerprint(self.model_dir, max_context=self.max_context),
            num_layers=len(layers),
            draft=heads.fingerprint if heads and num_draft_layers else "",
            num_draft_layers=num_draft_layers,
            plain_layers=config.layers_at("kv.unquantized_layers", self.unquantized_layers),
            plain_dtype=self.dtype,
            basis=fingerprint_of_bases(self.model_dir) if self.pool_dtype == "int4" else "",
            feature_bytes=heads.feature_bytes(config, itemsize=itemsize) if heads else 0,
            recurrent_layers=config.recurrent_layers,
            windows=config.kv_windows + (0,) * num_draft_layers if self.frees_windows else (),
            state_dtype=self.dtype,
            num_kv_heads=num_kv_heads,
            head_dim=dims,
            num_sides=config.kv_sides,
            exact_dim=tuple(map(config.kv_exact_dim, dims)),
            block_size=self.block_size,
            dtype=self.dtype if self.pool_dtype == "auto" else self.pool_dtype,
            tensor_parallel=tensor_parallel,
            weights=self.weights,
        )

    def bytes_beside_blocks(self, layout: KVLayout) -> int:
        """Return the bytes that draft heads keep on a rank, independent of the number of blocks. Raises SpecError."""
        model = model_config.load(self.model_dir)
        if (heads := self.load_heads(model)) is None:
            return 0
        itemsize, spare_bytes = getattr(torch, self.dtype).itemsize, sum(map(layout.layer_bytes, layout.draft_layers))
        return heads.bytes_beside_blocks(
            model, itemsize=itemsize, max_running=self.max_running, spare_bytes=spare_bytes
        )

    def windows(self, layout: KVLayout) -> WindowArithmetic:
        """Return the split of a pool between blocks and parts of layers with a window."""
        longest = model_config.load(self.model_dir).max_context
        return WindowArithmetic(
            window=layout.window,
            block_size=layout.block_size,
            max_context=min(longest, self.max_context or longest),
            max_batch_tokens=self.max_batch_tokens,
        )

    def load_heads(self, model: ModelConfig) -> HeadsConfig | None:
        """Load the draft heads, if any. Raises SpecError if the heads do not fit this model."""
        return load_heads(*self.heads, model) if self.heads else None


def device_for(*, gpus: float) -> torch.device:
    """Return the device of this process: its first GPU if it was assigned one, else the CPU."""
    return torch.device("cuda", 0) if gpus else torch.device("cpu")


def pool_sizes(layout: KVLayout, config: EngineConfig, *, gib: float, beside: int = 0) -> PoolSizes:
    """Return the blocks, state slots and parts of one rank that fit into `gib` GiB less `beside` bytes.

    Raises SpecError if no block fits.
    """
    windows = config.windows(layout) if layout.windows else None
    sizes = layout.cache.pool_sizes(int(gib * GIB) - beside, max_running=config.max_running, windows=windows)
    if sizes.num_blocks < 1:
        heads = f" plus {beside} bytes of draft heads" if beside else ""
        states = f" plus {sizes.num_states} states of {layout.state_bytes} bytes" if sizes.num_states else ""
        raise SpecError(
            f"kv_memory_gib: {gib} GiB hold no block of {layout.block_size} tokens: {layout.block_bytes} bytes"
            f"{heads}{states}"
        )
    return sizes
