"""One rank's model and its KV pool: what a worker's step loop calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cluster.model import config as model_config
from cluster.model.shape import ModelConfig
from cluster.words.errors import RequestError, SpecError
from engine.batch.batch import Batch, Row
from engine.cpu.library import open_kernels
from engine.decode_graphs import Capture, CudaCapture, DecodeGraphs
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.layers.shards import ShardReader
from engine.model.transformer import OnLayer, Transformer
from engine.orders import Orders
from engine.parallel import TensorParallel
from engine.step import ScheduledStep
from engine.weights.open_checkpoint import open_checkpoint

logger = logging.getLogger(__name__)

GIB = 1 << 30


def layout_for(
    model_dir: Path,
    *,
    dtype: str,
    weights: str = "as_stored",
    pool_dtype: str = "auto",
    block_size: int = 16,
    tensor_parallel: int = 1,
) -> KVLayout:
    """The KV layout of a model. `dtype`: of the computation; `pool_dtype`: "auto" for the same, "fp8_e4m3" or
    "int8"; `weights`: one of engine.layers.shards.WEIGHTS."""
    config = model_config.load(model_dir)
    config.check_tensor_parallel(tensor_parallel)
    return KVLayout(
        model=model_config.fingerprint(model_dir),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.kv_dim,
        num_sides=config.kv_sides,
        exact_dim=config.kv_exact_dim,
        block_size=block_size,
        dtype=dtype if pool_dtype == "auto" else pool_dtype,
        tensor_parallel=tensor_parallel,
        weights=weights,
    )


def num_blocks_for(layout: KVLayout, *, gib: float) -> int:
    """How many blocks of one rank fit into this much memory. Raises SpecError if none does."""
    if gib * GIB < layout.block_bytes:
        raise SpecError(
            f"kv_memory_gib: {gib} GiB hold no block of {layout.block_size} tokens: {layout.block_bytes} bytes"
        )
    return int(gib * GIB) // layout.block_bytes


class ModelRunner:
    """Computes batches. Owned by the step thread; every rank of a replica calls `forward` with the same batches."""

    def __init__(
        self,
        model_dir: Path,
        *,
        layout: KVLayout,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel | None = None,
        expert_parallel: bool = False,
        redundant_experts: int = 0,
        is_deterministic: bool = False,
        replayed_rows: int = 0,
        capture: Capture | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Loads this rank's weights, which takes a while: `progress` is told the fraction done. Raises SpecError.

        expert_parallel: each rank holds some experts whole, instead of a share of every one; redundant_experts: places
        for further copies of the experts that are chosen most.
        is_deterministic: refuse to compute in a way in which a row's bits depend on the rows beside it.
        replayed_rows: record decode steps of up to so many rows now, and replay them, where this model's steps can be
        recorded; capture: by what. None: by CUDA on its devices, and on others not at all.
        """
        self.config: ModelConfig = model_config.load(model_dir)
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.parallel = parallel or TensorParallel()
        assert layout.tensor_parallel == self.parallel.size
        if expert_parallel:
            self.config.check_expert_parallel(self.parallel.size, redundant=redundant_experts)
        kernels = open_kernels(dtype=dtype, device=device)
        if is_deterministic:
            self.config.check_deterministic()
            if kernels is None or layout.weights == "quantized":
                raise SpecError(
                    "engine: deterministic needs a CPU, bfloat16 and a C++ compiler on the worker's machine"
                )
        reader = ShardReader(
            open_checkpoint(model_dir),
            self.parallel,
            dtype,
            device,
            kernels,
            weights=layout.weights,
            spreads_experts=expert_parallel,
            redundant_experts=redundant_experts,
        )
        num_layers = self.config.num_layers

        def on_read(layer: int) -> None:
            if progress is not None:
                progress((layer + 1) / num_layers)

        with torch.inference_mode():
            self._model = Transformer(self.config, reader, layout, on_read=on_read)
        # Outside inference mode, for others write to it who are not in it: blocks that arrive from a peer.
        self.pool = KVPool(layout, num_blocks=num_blocks, device=device)
        if replayed_rows and capture is None and device.type == "cuda":
            capture = CudaCapture(device)
        self._graphs = self._record(replayed_rows, capture) if replayed_rows and capture else None

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: OnLayer | None = None) -> Tensor:
        """Compute one step. Returns the logits of the positions that rows want, (positions, vocabulary) fp32, row by
        row, on every rank; the next step may overwrite them.

        `on_layer(i)` is called as soon as layer i's keys and values of this batch are in the pool, before the layer's
        attention is computed. On a GPU that means: enqueued on the current stream. Raises RequestError for a row with
        an adapter, for this model has none.
        """
        if batch.adapters.any():
            raise RequestError(f"the model has no adapter {batch.adapters.max()}", param="adapter")
        if self._graphs is not None and on_layer is None and (logits_RV := self._graphs(batch)) is not None:
            return logits_RV
        return self._model(batch, self.pool, on_layer)

    def execute(self, step: ScheduledStep | None, orders: Orders) -> Tensor | None:
        """Implements engine.step.Runner for an engine whose only rank this is, or in which each rank leads itself."""
        for source, target in orders.copies:
            self.pool.copy_block(source, target)
        return self.forward(step.batch) if step else None

    def warm_up(self, max_tokens: int) -> None:
        """Before anything else, on every rank: compute prompts of up to so many tokens on a GPU, so that no request
        waits for kernels to be compiled. Leaves numbers without meaning in the pool's first blocks."""
        if self.device.type != "cuda":
            return
        begin, size = time.monotonic(), self.layout.block_size
        most = min(max_tokens, self.config.max_context, self.pool.num_blocks * size)
        for count in (1 << i for i in range(most.bit_length())):  # kernels differ by how many rows they are made for
            row = Row(token_ids=[0] * count, start=0, blocks=range(-(-count // size)), num_logits=1)
            self.forward(Batch.of([row], block_size=size), on_layer=lambda layer: None)
        self.pool.synchronize()
        logger.info("warmed up with up to %d tokens in %.1f s", most, time.monotonic() - begin)

    @torch.inference_mode()
    def _record(self, max_rows: int, capture: Capture) -> DecodeGraphs | None:
        if hindrance := self._model.hindrance:
            logger.info("decode steps are not recorded: %s", hindrance)
            return None
        begin = time.monotonic()
        graphs = DecodeGraphs(
            partial(self._model.compute, pool=self.pool),
            capture,
            max_rows=max_rows,
            max_context=min(self.config.max_context, self.pool.num_blocks * self.layout.block_size),
            block_size=self.layout.block_size,
            vocab_size=self.config.vocab_size,
            device=self.device,
        )
        logger.info("decode steps of up to %d rows recorded in %.1f s", max_rows, time.monotonic() - begin)
        return graphs
