"""Loading and warm-up of draft heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from core.model.draft_heads import HeadsConfig
from core.model.shape import ModelConfig
from core.types.errors import SpecError
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.kv.pool import KVPool
from engine.layers.shards import ShardReader
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.model.transformer import Transformer
from engine.runner.parallel import TensorParallel
from engine.spec_decode.heads.draft_layer import DraftLayer
from engine.spec_decode.heads.eagle import Eagle
from engine.spec_decode.heads.eagle_layers import Eagle1Layer, Eagle3Layer
from engine.spec_decode.heads.head_row import HeadRow
from engine.spec_decode.heads.heads import DraftHeads, HeadsRoom
from engine.spec_decode.heads.medusa import Medusa
from engine.spec_decode.heads.mtp_layer import MtpLayer
from engine.weights.open_checkpoint import open_checkpoint

_LAYERS: Mapping[str, Callable[[HeadsConfig, ModelConfig, HeadsRoom], DraftLayer]] = {
    "eagle": lambda *read: (Eagle3Layer if read[0].eagle3 else Eagle1Layer)(*read),
    "mtp": MtpLayer,
}


def open_heads(
    config: HeadsConfig, model: ModelConfig, *, reader: ShardReader, transformer: Transformer, max_rows: int
) -> DraftHeads | None:
    """Load the heads with a reader configured as the model's. Raises SpecError.

    Heads without KV layers run on rank 0 only; returns None on the other ranks.
    """
    parallel = reader.parallel
    if not config.num_kv_layers:
        if not parallel.is_leader:
            return None
        parallel = TensorParallel()
    config.check_tensor_parallel(parallel.size)
    own = replace(reader, parallel=parallel, spreads_experts=False, redundant_experts=0)
    if config.kind != "mtp":  # MTP is in the model's checkpoint
        own = replace(own, checkpoint=open_checkpoint(config.directory))
        # Drafts are verified, so speed is worth more than precision.
        if own.kernels:
            own = replace(own, weights="int8")
    room = HeadsRoom(reader=own, model=transformer, max_rows=max_rows)
    try:
        if config.kind == "medusa":
            return Medusa(config, model, room)
        return Eagle(_LAYERS[config.kind](config, model, room), config.layers, model, room)
    except SpecError as error:
        raise SpecError(f"{config.directory}: {error}") from None


def warm_up_heads(
    heads: DraftHeads, pool: KVPool, *, max_tokens: int, max_rows: int, hidden_size: int, dtype: torch.dtype
) -> None:
    """Call `follow` with every power of two of tokens, and `draft` with as many rows.

    The model itself computes nothing, because ranks without heads would not take part. Leaves meaningless values in the
    first blocks.
    """
    size = pool.layout.block_size
    for count in (1 << i for i in range(max_tokens.bit_length())):
        blocks = [number % pool.num_blocks for number in range(-(-count // size))]
        batch = Batch.of([Row([0] * count, 0, blocks, num_logits=1)], block_size=size)
        aux_hidden_states = AuxHiddenStates(heads.layers)
        aux_hidden_states.token_ids_T = torch.zeros(count, dtype=torch.int32, device=pool.device)
        for layer in heads.layers:
            aux_hidden_states.note(layer, torch.zeros(count, hidden_size, dtype=dtype, device=pool.device))
        heads.follow(batch, aux_hidden_states, None)
        rows = [HeadRow(0, count, [*blocks, blocks[0]])] * min(count, max_rows)
        heads.draft(rows, 1, lambda logits, known, place: [0] * len(known))
    heads.attach(pool)  # discards the features
