"""Medusa heads: each drafts one token further ahead. Cai et al. 2024, arXiv:2401.10774.

    x = the model's last hidden state, normed, of a sequence's last position but one
    head i:  x + silu(linear(x)), num_residuals times; then a projection to the vocabulary: token i + 1 after the next

The model's own head at that position gives the sequence's last token, so head 0 drafts the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.nn.functional as F

from core.model.draft_heads import HeadsConfig
from core.model.shape import ModelConfig
from engine.batch.batch import Batch
from engine.kv.pool import KVPool
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.runner import streams
from engine.spec_decode.heads.features import Features, continuable
from engine.spec_decode.heads.head_row import Choose, HeadLogits, HeadRow
from engine.spec_decode.heads.heads import DraftHeads, HeadsRoom
from engine.weights.checkpoint import Shape, check_tensors

# R rows, E hidden_size, V vocabulary


class Medusa(DraftHeads):
    """Medusa heads, which keep nothing in the pool.

    A feature missing from the ring costs one step without a draft.
    """

    def __init__(self, config: HeadsConfig, model: ModelConfig, room: HeadsRoom) -> None:
        """Read the heads. Raises SpecError if they do not fit config.json or the model."""
        reader, found = room.reader, room.reader.checkpoint.shapes
        names = _OLD if "0.0.linear.weight" in found else _NEW
        check_tensors(reader.checkpoint, _expected(config, model, names))
        self.layers = config.layers
        self._room = room
        self._hidden_size = model.hidden_size
        vocabulary = 0, model.vocab_size
        hidden = 0, model.hidden_size
        self._heads = [
            (
                [
                    reader.linear({names[0].format(i=i, j=j): hidden}, has_bias=True)
                    for j in range(config.num_residuals)
                ],
                reader.linear({names[1].format(i=i, n=config.num_residuals): vocabulary}),
            )
            for i in range(config.num_heads)
        ]

    def attach(self, pool: KVPool) -> None:
        self.features = Features(
            pool, dim=self._hidden_size, dtype=self._room.reader.dtype, capacity=self._room.num_places
        )

    def follow(self, batch: Batch, aux_hidden_states: AuxHiddenStates, on_layer: Callable[[int], None] | None) -> None:
        last_N = continuable(batch)
        x_TE = aux_hidden_states[self.layers[0]]
        self.features.keep(batch.slots[last_N], x_TE[streams.upload_indices(last_N, x_TE.device)])

    def knows(self, rows: Sequence[HeadRow]) -> bool:
        return self.features.knows(rows)

    def num_behind(self, row: HeadRow) -> int | None:
        return 0 if self.knows([row]) else None

    def draft(self, rows: Sequence[HeadRow], max_tokens: int, choose: Choose) -> None:
        known, last_RE = self.features.before(rows)
        if not known:
            return
        normed_RE = self._room.model.normed(last_RE)
        for place, (residuals, projection) in enumerate(self._heads[:max_tokens]):
            x_RE = normed_RE
            for linear in residuals:
                x_RE = x_RE + F.silu(linear(x_RE))
            choose(HeadLogits(projection(x_RE).float()), known, place)


_OLD = "{i}.{j}.linear", "{i}.{n}"  # names in checkpoints of Medusa's own repository
_NEW = "blocks.{i}.layers.{j}", "lm_heads.{i}"


def _expected(config: HeadsConfig, model: ModelConfig, names: tuple[str, str]) -> Mapping[str, Shape]:
    tensors: dict[str, Shape] = {}
    hidden = model.hidden_size
    for i in range(config.num_heads):
        for j in range(config.num_residuals):
            name = names[0].format(i=i, j=j)
            tensors |= {f"{name}.weight": (hidden, hidden), f"{name}.bias": (hidden,)}
        tensors[names[1].format(i=i, n=config.num_residuals) + ".weight"] = (model.vocab_size, hidden)
    return tensors
