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
from engine.weights.open_checkpoint import open_checkpoint

_KINDS: Mapping[str, Callable[[HeadsConfig, ModelConfig, HeadsRoom], DraftHeads]] = {"medusa": Medusa, "eagle": Eagle}


def open_heads(
    config: HeadsConfig, model: ModelConfig, *, reader: ShardReader, parts: ModelParts, max_rows: int
) -> DraftHeads:
    """reader: as the model's own matrices are read. Raises SpecError."""
    if reader.parallel.size > 1:
        raise SpecError(f"speculation: {config.kind} heads need tensor_parallel 1: they are asked by rank 0 alone")
    own = replace(reader, checkpoint=open_checkpoint(config.directory), spreads_experts=False, redundant_experts=0)
    try:
        return _KINDS[config.kind](config, model, HeadsRoom(reader=own, model=parts, max_rows=max_rows))
    except SpecError as error:
        raise SpecError(f"{config.directory}: {error}") from None
