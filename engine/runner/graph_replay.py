"""Recorded decode steps of a model, with the auxiliary hidden states that draft heads need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.config import GIB
from engine.kernels.recurrent.state_slots import StateSlots
from engine.kv.pool import KVPool
from engine.model.aux_hidden_states import AuxHiddenStates, StaticAuxHiddenStates
from engine.model.layer_kinds import StepStates
from engine.model.transformer import Transformer
from engine.runner.decode_graphs import Capture, DecodeGraphs, graph_sizes

# R positions with logits, N rows that a graph computes, V vocabulary

# Bytes of KV that a replayed step may read repeatedly. An H100 reads them in 1.3 ms, less than it takes to launch a
# step kernel by kernel (320 kernels for Llama 8B).
READ_AGAIN_BYTES = 4 * GIB


class RecordedSteps:
    """Recorded steps of one rank over one pool. Owned by the step thread."""

    def __init__(self, graphs: DecodeGraphs, static_aux_hidden_states: StaticAuxHiddenStates | None) -> None:
        self._graphs = graphs
        self._static_aux_hidden_states = static_aux_hidden_states

    def __call__(self, batch: Batch) -> tuple[Tensor, AuxHiddenStates | None] | None:
        """Return the logits (R, V) fp32 and the hidden states; None if no graph fits the batch.

        Both are valid until the next step.
        """
        logits_RV = self._graphs(batch)
        if logits_RV is None:
            return None
        if self._static_aux_hidden_states is None:
            return logits_RV, None
        return logits_RV, self._static_aux_hidden_states.of(self._graphs.token_ids_M[: batch.num_tokens])


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Recorder of decode steps of one rank's model. All ranks record the same steps in the same order."""

    model: Transformer
    max_rows: int
    tapped: Sequence[int] | None  # layers to keep hidden states of, see AuxHiddenStates; None: no heads
    block_size: int
    bytes_per_token: int  # KV
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype  # hidden states
    device: torch.device

    @torch.inference_mode()
    def record(
        self, pool: KVPool, capture: Capture, *, max_context: int, num_sizes: int | None = None
    ) -> RecordedSteps:
        """Record the steps. num_sizes: record only that many of the largest sizes."""
        static_aux_hidden_states = None if self.tapped is None else self._static_aux_hidden_states(self.tapped)

        def compute(batch: DeviceBatch, state_slots: StateSlots | None) -> Tensor:
            states = None if state_slots is None else StepStates(pool, state_slots)
            if static_aux_hidden_states is None:
                return self.model.compute(batch, pool, states=states)
            aux_hidden_states = static_aux_hidden_states.new()
            logits_NV = self.model.compute(batch, pool, aux_hidden_states=aux_hidden_states, states=states)
            static_aux_hidden_states.keep(aux_hidden_states)
            return logits_NV

        graphs = DecodeGraphs(
            compute,
            capture,
            max_rows=self.max_rows,
            has_states=bool(pool.states),
            num_sizes=num_sizes,
            max_context=max_context,
            max_read_again=READ_AGAIN_BYTES // self.bytes_per_token,
            most_queries=self.model.most_queries,
            block_size=self.block_size,
            vocab_size=self.vocab_size,
            device=self.device,
            window_of=pool.window_of,
        )
        return RecordedSteps(graphs, static_aux_hidden_states)

    def _static_aux_hidden_states(self, layers: Sequence[int]) -> StaticAuxHiddenStates:
        return StaticAuxHiddenStates(
            layers,
            max_tokens=graph_sizes(self.max_rows)[-1],
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            device=self.device,
        )
