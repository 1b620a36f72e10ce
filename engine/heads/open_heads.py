"""Which heads a directory holds, loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cluster.model.draft_heads import HeadsConfig
from cluster.model.shape import ModelConfig
from cluster.words.errors import SpecError
from engine.heads.eagle import Eagle
from engine.heads.heads import DraftHeads, HeadsRoom, ModelParts
from engine.heads.medusa import Medusa
from engine.layers.shards import ShardReader
from engine.parallel import TensorParallel
from engine.weights.open_checkpoint import open_checkpoint

_KINDS: Mapping[str, Callable[[HeadsConfig, ModelConfig, HeadsRoom], DraftHeads]] = {"medusa": Medusa, "eagle": Eagle}


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
    own = replace(
        reader,
        checkpoint=open_checkpoint(config.directory),
        parallel=parallel,
        spreads_experts=False,
        redundant_experts=0,
    )
    try:
        return _KINDS[config.kind](config, model, HeadsRoom(reader=own, model=parts, max_rows=max_rows))
    except SpecError as error:
        raise SpecError(f"{config.directory}: {error}") from None
