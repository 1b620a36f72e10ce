"""Which heads draft beside a model, loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from core.model.draft_heads import HeadsConfig
from core.model.shape import ModelConfig
from core.types.errors import SpecError
from engine.layers.shards import ShardReader
from engine.runner.parallel import TensorParallel
from engine.spec_decode.heads.draft_layer import DraftLayer
from engine.spec_decode.heads.eagle import Eagle
from engine.spec_decode.heads.eagle1_layer import Eagle1Layer
from engine.spec_decode.heads.eagle3_layer import Eagle3Layer
from engine.spec_decode.heads.heads import DraftHeads, HeadsRoom, ModelParts
from engine.spec_decode.heads.medusa import Medusa
from engine.spec_decode.heads.mtp_layer import MtpLayer
from engine.weights.open_checkpoint import open_checkpoint

_LAYERS: Mapping[str, Callable[[HeadsConfig, ModelConfig, HeadsRoom], DraftLayer]] = {
    "eagle": lambda *read: (Eagle3Layer if read[0].draft_vocab_size else Eagle1Layer)(*read),
    "mtp": MtpLayer,
}


def open_heads(
    config: HeadsConfig, model: ModelConfig, *, reader: ShardReader, parts: ModelParts, max_rows: int
) -> DraftHeads | None:
    """reader: as the model's own matrices are read. None: heads that keep nothing in the pool are rank 0's alone, and
    this is another one. Raises SpecError."""
    parallel = reader.parallel
    if not config.num_kv_layers:
        if not parallel.is_leader:
            return None
        parallel = TensorParallel()
    config.check_tensor_parallel(parallel.size)
    own = replace(reader, parallel=parallel, spreads_experts=False, redundant_experts=0)
    if config.kind != "mtp":  # which is in the model's checkpoint
        own = replace(own, checkpoint=open_checkpoint(config.directory))
        if own.kernels:  # what is guessed is verified: half the bytes are worth more than their last bits
            own = replace(own, weights="int8")
    room = HeadsRoom(reader=own, model=parts, max_rows=max_rows)
    try:
        if config.kind == "medusa":
            return Medusa(config, model, room)
        return Eagle(_LAYERS[config.kind](config, model, room), config.layers, model, room)
    except SpecError as error:
        raise SpecError(f"{config.directory}: {error}") from None
