"""Runner of one rank: its model and its KV pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from core.model import config as model_config
from core.model.kv_memory import PoolSizes
from core.model.shape import ModelConfig
from core.types.errors import RequestError, SpecError
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import GIB, EngineConfig, pool_sizes
from engine.cpu.autotune import MeasuredWays
from engine.cpu.huge_pages import populate, trim_heap
from engine.cpu.library import open_copies, open_kernels
from engine.kernels.sample import NUM_NUMBERS, launch_choice, launch_log_norms
from engine.kv.basis import open_bases
from engine.kv.pool import KVPool
from engine.layers.shards import ShardReader
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.model.transformer import OnLayer, OnLogits, Transformer
from engine.runner.decode_graphs import Capture, CudaCapture
from engine.runner.device_memory import CudaGauge, Gauge, out_of_memory
from engine.runner.graph_replay import RecordedSteps, Recorder
from engine.runner.memory_profiling import MemoryTrial
from engine.runner.parallel import TensorParallel
from engine.sampling.prompt_scorer import Scorer
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.spec_decode.heads.head_row import Choose, HeadRow
from engine.spec_decode.heads.heads import DraftHeads
from engine.spec_decode.heads.open_heads import open_heads, warm_up_heads
from engine.weights.checkpoint import Checkpoint, listed
from engine.weights.open_checkpoint import open_model

logger = logging.getLogger(__name__)

_CPU_KV_GIB = 1.0


class ModelRunner:
    """Executor of batches. Owned by the step thread; every rank of a replica calls `forward` with the same batches."""

    def __init__(
        self,
        config: EngineConfig,
        parallel: TensorParallel | None = None,
        *,
        checkpoint: Checkpoint | None = None,
        capture: Capture | None = None,
        gauge: Gauge | None = None,
        progress: Callable[[float], None] | None = None,
        is_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """Load this rank's weights. `progress` is called with the fraction done. Raises SpecError.

        is_loaded: called when this rank's weights are loaded; returns once every rank has loaded, before any
        computation. gauge: measures memory to size the pool if no number of blocks is configured; None: the GPU's
        gauge, none on a CPU.

        checkpoint: source of the weights; None: the files of the model directory. capture: records decode steps; None:
        CUDA graphs on a GPU, nothing elsewhere.
        """
        self.parallel = parallel or TensorParallel()
        self.layout = config.layout(tensor_parallel=self.parallel.size)
        self.config: ModelConfig = model_config.load(config.model_dir, max_context=config.max_context)
        self._max_drafted = config.max_running
        self._max_context = min(self.config.max_context, config.max_context or self.config.max_context)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.device = torch.device(config.device)
        num_blocks, self._bytes_beside = config.num_blocks, config.bytes_beside_blocks(self.layout)
        num_states, num_parts = 2 * config.max_running, config.num_window_parts
        if num_blocks is None and gauge is None and self.device.type == "cuda":
            gauge = CudaGauge(self.device)
        elif num_blocks is None and gauge is None:
            gib = config.kv_memory_gib or _CPU_KV_GIB
            num_blocks, num_states, num_parts = pool_sizes(self.layout, config, gib=gib, beside=self._bytes_beside)
        if config.expert_parallel:
            self.config.check_expert_parallel(self.parallel.size, redundant=config.redundant_experts)
        self.spreads_experts = config.expert_parallel and self.parallel.size > 1  # see SpreadExperts
        kernels = open_kernels(dtype=self.dtype, device=self.device)
        open_copies(self.device)  # compiles the copy and sampling kernels now instead of in the first step
        if config.deterministic:
            self.config.check_deterministic()
            if kernels is None:
                raise SpecError(
                    "engine: deterministic needs a CPU, bfloat16, and a C++ compiler on the worker's machine"
                )
        self._measured = None
        if self.device.type == "cuda":
            self._measured = MeasuredWays.of_gpu(self.device)
        elif kernels and not config.deterministic:
            self._measured = MeasuredWays.of_this_machine(kernels.version)
        reader = ShardReader(
            checkpoint or open_model(config.model_dir, self.config),
            self.parallel,
            self.dtype,
            self.device,
            kernels,
            self._measured,
            weights=config.weights,
            spreads_experts=config.expert_parallel,
            redundant_experts=config.redundant_experts,
        )
        num_layers = self.config.num_layers

        def on_read(layer: int) -> None:
            if progress is not None:
                progress((layer + 1) / num_layers)

        before = gauge.allocated() if gauge else 0
        try:
            with torch.inference_mode():
                bases = open_bases(config.model_dir, self.layout)
                self._model = Transformer(self.config, reader, self.layout, on_read=on_read, bases=bases)
                self.heads = self._open_heads(config, reader)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self.device, "its weights", error) from error
        if self.parallel.is_leader:
            for reason, names in reader.widened.items():
                logger.warning(
                    "%d quantized matrices are held in %s, because %s: %s",
                    len(names), config.dtype, reason, listed(names),
                )  # fmt: skip
        is_loaded()
        if self.device.type == "cpu":
            trim_heap()
        make_capture = self._capture_maker(config.recorded_rows, capture)
        if num_blocks is None:
            assert gauge, "without a gauge the number of blocks is known here"
            num_blocks, num_states, num_parts = self._pool_sizes(
                config, gauge, make_capture, weights=gauge.allocated() - before
            )
        # Outside inference mode, because transfers write to it outside inference mode, too.
        self.pool = KVPool(
            self.layout,
            num_blocks=num_blocks,
            device=self.device,
            num_spare=config.max_running,
            num_states=num_states,
            num_window_parts=num_parts,
        )
        if self.device.type == "cpu":
            populate([*self.pool.codes, *self.pool.scales])
        if self.heads:
            self.heads.attach(self.pool)
        self._recorded: RecordedSteps | None = None
        if make_capture:
            begin, recorder = time.monotonic(), self._recorder(config.recorded_rows)
            self._recorded = recorder.record(self.pool, make_capture(), max_context=self.max_tokens)
            logger.info(
                "decode steps recorded max_rows=%d seconds=%.1f", config.recorded_rows, time.monotonic() - begin
            )

    @property
    def ways(self) -> list[dict[str, Any]]:
        """Measurements that selected the product and attention kernels on this CPU, as plain values."""
        return self._measured.table() if self._measured else []

    @property
    def max_tokens(self) -> int:
        """Maximum tokens per sequence: limited by the model, the configuration and the pool."""
        return min(self._max_context, self.pool.num_blocks * self.layout.block_size)

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: OnLayer | None = None, on_logits: OnLogits | None = None) -> Tensor:
        """Compute one step. Returns the requested logits, (positions, vocabulary) fp32, in row order, on every rank.

        The next step may overwrite them. `on_layer(i)` is called as soon as layer i's keys and values of this batch are
        in the pool (on a GPU: enqueued on the current stream), before the layer's attention. `on_logits` gets the
        logits of scored positions, in slices, before the call returns. Raises RequestError for a row with an adapter:
        this model has none.
        """
        if batch.adapters.any():
            raise RequestError(f"the model has no adapter {batch.adapters.max()}", param="adapter")
        if batch.device_tokens and self.device.type == "cpu":
            batch.device_tokens.fill(batch.token_ids)
        if self._recorded and on_layer is None and (replayed := self._recorded(batch)):
            logits_RV, aux_hidden_states = replayed
        else:
            aux_hidden_states = (
                AuxHiddenStates(self.heads.layers) if self.heads and not self.heads.pass_over(batch, on_layer) else None
            )
            logits_RV = self._model(batch, self.pool, on_layer, on_logits, aux_hidden_states)
        if self.heads and aux_hidden_states:
            self.heads.follow(batch, aux_hidden_states, on_layer)
        return logits_RV

    @torch.inference_mode()
    def draft(self, rows: Sequence[HeadRow], max_tokens: int, choose: Choose) -> None:
        """Draft with the heads: see DraftHeads."""
        assert self.heads, "this rank has no draft heads"
        self.heads.draft(rows, max_tokens, choose)

    @property
    def max_drafted(self) -> int:
        """Maximum rows of a `draft` call."""
        return self._max_drafted if self.heads else 0

    def num_behind(self, row: HeadRow) -> int | None:
        """See DraftHeads."""
        return self.heads.num_behind(row) if self.heads else None

    @torch.inference_mode()
    def catch_up(self, rows: Sequence[HeadRow], max_tokens: int | None = None) -> None:
        """See DraftHeads."""
        if self.heads:
            self.heads.catch_up(rows, max_tokens)

    def rest(self, num_first: int | None) -> None:
        """See DraftHeads."""
        if self.heads:
            self.heads.rest(num_first)

    @torch.inference_mode()
    def settle(self) -> None:
        """Write deferred draft KV to the pool.

        Call before anything other than a step reads from or writes to the pool.
        """
        if self.heads:
            self.heads.settle()

    @torch.inference_mode()
    def copy(self, orders: Orders) -> None:
        """Update the parts of blocks. Copy the blocks inside which sequences fork, and state slots."""
        self.pool.attach(orders.parts)
        if orders.copies:
            self.settle()
        for source, target in orders.copies:
            self.pool.copy_block(source, target)
            if self.heads:
                self.heads.features.take_copy(source, target)
        for source, target in orders.state_copies:
            self.pool.copy_state(source, target)

    def without(self, layers: Collection[int]) -> Callable[[Batch], Tensor]:
        """Return `forward` without some layers, whose part of the pool stays unchanged. Requires a single rank."""
        assert self.parallel.size == 1, "skipping layers is not synchronized between ranks"
        part = self._model.without(layers)

        @torch.inference_mode()
        def forward(batch: Batch) -> Tensor:
            return part(batch, self.pool, None)

        return forward

    def execute(self, step: ScheduledStep | None, orders: Orders) -> Tensor | None:
        """Implement engine.scheduler.step.Runner for engines that every rank runs itself, without a leading rank."""
        self.copy(orders)
        scorer = Scorer.of(step)
        return self.forward(step.batch, on_logits=scorer.add if scorer else None) if step else None

    @torch.inference_mode()
    def warm_up(self, max_tokens: int, *, on_chosen: Callable[[], None] = lambda: None) -> None:
        """Compute prompts of up to `max_tokens` tokens on a GPU, so that no request waits for kernels to be compiled.

        Call first, on every rank. Leaves meaningless values in the pool's first blocks. on_chosen: called when this
        rank has chosen its kernels; all ranks take part in the all-reduces that follow.
        """
        if self.device.type != "cuda":
            return
        begin, most = time.monotonic(), min(max_tokens, self.max_tokens)
        self._model.choose_prompt_heads(self.pool)
        on_chosen()
        with self.pool.with_parts():
            self._compute_prompts(self.pool, most)
        if self.heads:
            warm_up_heads(
                *(self.heads, self.pool),
                max_tokens=most,
                max_rows=self._max_drafted,
                hidden_size=self.config.hidden_size,
                dtype=self.dtype,
            )
        logits = torch.zeros(1, self.config.vocab_size, device=self.device)
        launch_log_norms(logits)
        for numbers in (None, torch.zeros(1, NUM_NUMBERS, dtype=torch.int32, device=self.device)):
            launch_choice(logits, numbers)
        self.pool.synchronize()
        logger.info("warmed up max_tokens=%d seconds=%.1f", most, time.monotonic() - begin)

    @torch.inference_mode()
    def _compute_prompts(self, pool: KVPool, max_tokens: int) -> None:
        """Compute prompts of every power of two of tokens, because kernels are specialized by the number of rows.

        First broadcast between the ranks, as async scheduling does: NCCL sets up connections and memory on first use.
        With sparse attention, also compute rows that choose positions.
        """
        self.parallel.broadcast_on_device(torch.zeros(1, dtype=torch.int32, device=self.device))
        size, latent = self.layout.block_size, self.config.latent
        steps = [[(0, 1 << i)] for i in range(max_tokens.bit_length())]
        if latent and latent.index and latent.index.top_k + 2 <= self._max_context:
            steps.append([(latent.index.top_k, 1), (latent.index.top_k, 2)])
        for step in steps:
            rows = [
                Row(
                    token_ids=[0] * count,
                    start=start,
                    blocks=[number % pool.num_blocks for number in range(-(-(start + count) // size))],
                    num_logits=1,
                )
                for start, count in step
            ]
            self._model(Batch.of(rows, block_size=size), pool, lambda layer: None)
        pool.synchronize()

    @torch.inference_mode()
    def _compute_largest(self, batch: Batch, pool: KVPool) -> None:
        """Compute a step and its drafting over a temporary pool. Keeps nothing."""
        if self.heads is None:
            self._model(batch, pool, None)
            return
        heads, aux_hidden_states = self.heads, AuxHiddenStates(self.heads.layers)
        heads.attach(pool)
        self._model(batch, pool, None, None, aux_hidden_states)
        heads.follow(batch, aux_hidden_states, None)
        ends, tables = batch.context_lens.tolist(), batch.block_tables.tolist()
        rows = [HeadRow(0, end, [*table, table[0]]) for end, table in zip(ends, tables, strict=True)]
        heads.draft(rows, 1, lambda logits, known, place: [0] * len(known))
        heads.attach(KVPool(self.layout, num_blocks=1, device=self.device))  # frees the other pool

    def _open_heads(self, config: EngineConfig, reader: ShardReader) -> DraftHeads | None:
        found = config.load_heads(self.config)
        if found is None:
            return None
        return open_heads(found, self.config, reader=reader, transformer=self._model, max_rows=config.max_running)

    def _capture_maker(self, recorded_rows: int, capture: Capture | None) -> Callable[[], Capture] | None:
        """Return a factory of captures; None if no steps are recorded."""
        if not recorded_rows or not (capture or self.device.type == "cuda"):
            return None
        if hindrance := self._model.hindrance:
            logger.info("decode steps not recorded reason=%s", hindrance)
            return None
        return lambda: capture or CudaCapture(self.device)

    def _recorder(self, max_rows: int) -> Recorder:
        return Recorder(
            model=self._model,
            max_rows=max_rows,
            tapped=self.heads.layers if self.heads else None,
            block_size=self.layout.block_size,
            bytes_per_token=self.layout.bytes_per_token(),
            vocab_size=self.config.vocab_size,
            hidden_size=self.config.hidden_size,
            dtype=self.dtype,
            device=self.device,
        )

    def _pool_sizes(
        self, config: EngineConfig, gauge: Gauge, make_capture: Callable[[], Capture] | None, *, weights: int
    ) -> PoolSizes:
        """Return the sizes of the pool that fit on the rank with the least room. Raises SpecError."""
        trial = MemoryTrial(
            warm_up=lambda pool: self._compute_prompts(pool, config.max_batch_tokens),
            compute=self._compute_largest,
            record=lambda pool, capture, longest, num_sizes: self._recorder(config.recorded_rows).record(
                pool, capture, max_context=longest, num_sizes=num_sizes
            ),
            make_capture=make_capture,
            least=self.parallel.least,
        )
        memory = trial.measure(
            config,
            gauge,
            layout=self.layout,
            weights=weights,
            vocab_size=self.config.vocab_size,
            max_context=self._max_context,
            device=self.device,
            num_spare=config.max_running if self.heads else 0,
        )
        wanted = None if config.kv_memory_gib is None else int(config.kv_memory_gib * GIB)
        pool_bytes = memory.pool_bytes(wanted, least=self.layout.block_bytes + self._bytes_beside)
        logger.info("memory of %s, %s", self.device, memory.table(pool_bytes))
        gib = self.parallel.least(pool_bytes) / GIB
        return pool_sizes(self.layout, config, gib=gib, beside=self._bytes_beside)
