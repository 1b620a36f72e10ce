"""EAGLE-3: a decoder layer of its own, over the model's hidden states. Li et al. 2025, arXiv:2503.01840.

    f(t)   the model's hidden states of position t after three of its layers, and fc of the three together
    entry  at slot t: the embedding of token t, and f(t - 1); at slot 0, where nothing is before, zeros
    layer  x = f + attention(norm(embedding), norm(f)); x + mlp(norm(x)); what it says of token t + 1 is head(norm(x))
    next   while it drafts, its own x, not normed, takes the place of f

So what slot t keeps follows from the tokens up to t, as in every other layer; the layer is one more of the KV pool, and
whoever ships, stores or finds a block has it along. A step puts keys and values of its tokens there, which takes fc and
two narrow products; all the rest is computed only where a draft is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.model.draft_heads import HeadsConfig
from cluster.model.shape import ModelConfig
from cluster.words.errors import SpecError
from engine.attention.cpu_heads import CompiledHeads
from engine.attention.heads import Heads, TorchHeads
from engine.attention.rotary import Rotary
from engine.attention.triton_heads import KernelHeads
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.batch.rows import Ints, Row
from engine.heads.features import UNKNOWN, Features, begin_slots, going_on
from engine.heads.head_row import Choose, HeadRow
from engine.heads.heads import HeadsRoom
from engine.kernels.rotary import rotate
from engine.kv.layout import head_range
from engine.kv.pool import KVPool
from engine.layers.residual import Residual
from engine.model.gated_mlp import GatedMLP
from engine.model.taps import Taps
from engine.parallel import TensorParallel
from engine.weights.checkpoint import Shape, Span, check_tensors

# T tokens of a step, R rows, E hidden_size, K kv heads, D tokens that the head knows, V vocabulary

_LAYER = "midlayer"
_NEVER = -1e30  # a logit: infinite ones are of models that have failed


class Eagle:
    """Implements DraftHeads."""

    def __init__(self, config: HeadsConfig, model: ModelConfig, room: HeadsRoom) -> None:
        """Reads the head. Raises SpecError if it does not fit config.json, or the model."""
        reader, shape = room.reader, config.shape
        assert shape is not None
        found = reader.checkpoint.shapes
        also = {"embed_tokens.weight": (model.vocab_size, shape.hidden_size), "d2t": (config.draft_vocab_size,)}
        expected = {**_expected(config, shape), **{name: size for name, size in also.items() if name in found}}
        check_tensors(found, expected, optional=frozenset({"t2d"}))
        self.layers = config.layers
        self._room = room
        self._index = model.num_layers
        self._hidden_size, self._dim = shape.hidden_size, shape.head_dim
        attention, q_rows, kv_rows = f"{_LAYER}.self_attn", *_own_rows(shape, reader.parallel)
        kv = {f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows}
        eps = shape.rms_norm_eps
        self._fuse = reader.linear({"fc": (0, shape.hidden_size)})  # whole: every rank keeps the same features
        self._embedding_norm = reader.norm(f"{_LAYER}.input_layernorm", eps)
        self._feature_norm = reader.norm(f"{_LAYER}.hidden_norm", eps)
        self._kv = reader.linear(kv)
        self._qkv = reader.linear({f"{attention}.q_proj": q_rows} | kv)
        self._output = reader.row_parallel(f"{attention}.o_proj", q_rows)
        self._mlp_norm = reader.norm(f"{_LAYER}.post_attention_layernorm", eps)
        self._mlp = GatedMLP.read(reader, shape, f"{_LAYER}.mlp")
        self._norm = reader.norm("norm", eps)
        self._head = reader.linear({"lm_head": reader.parallel.span(config.draft_vocab_size)})
        self._num_known = config.draft_vocab_size
        self._embed: Callable[[Tensor], Tensor] = room.model.embed
        if "embed_tokens.weight" in found:
            self._embed = reader.embedding("embed_tokens", model.vocab_size)
        self._vocab_size = model.vocab_size
        self._known_D: Tensor | None = None  # which of the model's tokens the head's are; None: they are the same
        if "d2t" in found:
            offsets_D = reader.checkpoint.read("d2t").long()
            self._known_D = (offsets_D + torch.arange(len(offsets_D))).to(reader.device)
            if not 0 <= int(self._known_D.min()) <= int(self._known_D.max()) < model.vocab_size:
                raise SpecError(f"d2t names tokens beyond the model's {model.vocab_size}")
        self._rotary = Rotary(shape, reader.device)

    def attach(self, pool: KVPool) -> None:
        """pool: with a spare block for every row that is asked about at a time."""
        self.features = Features(
            pool, dim=self._hidden_size, dtype=self._room.reader.dtype, capacity=self._room.num_places
        )
        self._pool = pool

    def follow(self, batch: Batch, taps: Taps, on_layer: Callable[[int], None] | None) -> None:
        pool, device = self._pool, self._pool.device
        fused_TE = self._fuse(torch.cat([taps[layer] for layer in self.layers], dim=-1))
        begin_R = torch.from_numpy(np.cumsum(batch.query_lens) - batch.query_lens).to(device)
        before_TE = torch.roll(fused_TE, 1, dims=0)
        before_TE[begin_R] = self._read(begin_slots(batch, block_size=pool.layout.block_size))
        assert taps.token_ids_T is not None
        positions_T = torch.from_numpy(batch.positions).to(device)
        cos_T1F, sin_T1F = self._rotary(positions_T, fused_TE.dtype)
        kv_TND = torch.unflatten(self._kv(self._entry(taps.token_ids_T, before_TE)), -1, (-1, self._dim))
        if self._room.reader.kernels is not None:
            heads = CompiledHeads(self._room.reader.kernels, batch, pool, cos_T1F, sin_T1F)
            heads.store(self._index, kv_TND, q_norm=None, k_norm=None)  # no queries
        else:
            k_TKD, v_TKD = kv_TND.chunk(2, dim=1)
            slots_T = torch.from_numpy(batch.slots).to(device)
            pool.write(self._index, slots_T, rotate(k_TKD, cos_T1F, sin_T1F), v_TKD)
        last_N = going_on(batch)
        self.features.keep(batch.slots[last_N], fused_TE[torch.from_numpy(last_N).to(device)])
        self.features.keep_ends(batch.slots, fused_TE)
        if on_layer is not None:  # what full blocks keep is shipped with this layer
            on_layer(self._index)

    def draft(self, rows: Sequence[HeadRow], max_tokens: int, choose: Choose) -> None:
        """At most a block of tokens of at most `max_rows` rows: so much is spare."""
        pool, size, most_rows = self._pool, self._pool.layout.block_size, self._room.max_rows
        known, feature_RE = self.features.before(rows[:most_rows])
        if not known:
            return
        asked = [rows[i] for i in known]
        # What is beyond a row's own blocks is written behind the pool.
        tables = [[*row.blocks[: row.position // size + 1], pool.num_blocks + i] for i, row in enumerate(asked)]
        token_ids: Sequence[int] = [row.token_id for row in asked]
        for place in range(min(max_tokens, size)):
            entries = [
                Row([0], start=row.position + place, blocks=table, num_logits=1)
                for row, table in zip(asked, tables, strict=True)
            ]
            token_ids_R = torch.tensor(token_ids, device=pool.device)
            feature_RE = self._layer(Batch.of(entries, block_size=size), token_ids_R, feature_RE)
            token_ids = choose(self._logits(feature_RE), known, place)

    def _logits(self, feature_RE: Tensor) -> Tensor:
        """(R, V) fp32, of the model's tokens."""
        own_RD = self._head(feature_RE, before=self._norm)
        logits_RD = self._room.reader.parallel.all_gather(own_RD, self._num_known).float()
        if self._known_D is None:
            return logits_RD
        logits_RV = torch.full((len(logits_RD), self._vocab_size), _NEVER, device=logits_RD.device)
        return logits_RV.index_copy_(1, self._known_D, logits_RD)

    def _layer(self, batch: Batch, token_ids_R: Tensor, feature_RE: Tensor) -> Tensor:
        """Of one entry of each row: (R, E), not normed."""
        cos_R1F, sin_R1F = self._rotary(torch.from_numpy(batch.positions).to(feature_RE.device), feature_RE.dtype)
        heads = self._heads(batch, cos_R1F, sin_R1F)
        heads_RND = torch.unflatten(self._qkv(self._entry(token_ids_R, feature_RE)), -1, (-1, self._dim))
        q_RHD = heads.store(self._index, heads_RND, q_norm=None, k_norm=None)
        attended_RHD = heads.attend(self._index, q_RHD, window=None)
        x = Residual(feature_RE, adds_late=False)
        x.add_product(self._output, attended_RHD.flatten(1))
        self._mlp(x, norm=self._mlp_norm)
        return x.total()

    def _entry(self, token_ids_T: Tensor, feature_TE: Tensor) -> Tensor:
        """(T, 2 E)"""
        return torch.cat((self._embedding_norm(self._embed(token_ids_T)), self._feature_norm(feature_TE)), dim=-1)

    def _heads(self, batch: Batch, cos_R1F: Tensor, sin_R1F: Tensor) -> Heads:
        pool = self._pool
        if pool.device.type == "cuda":
            return KernelHeads(DeviceBatch.of(batch, pool.device), pool, cos_R1F, sin_R1F)
        if self._room.reader.kernels is not None:
            return CompiledHeads(self._room.reader.kernels, batch, pool, cos_R1F, sin_R1F)
        return TorchHeads(batch, pool, cos_R1F, sin_R1F, [None])

    def _read(self, slots_R: Ints) -> Tensor:
        """Zeros where nothing is known, and before the first position."""
        return self.features.read(np.where(slots_R == UNKNOWN, UNKNOWN, self.features.find(slots_R)))


def _own_rows(shape: ModelConfig, parallel: TensorParallel) -> tuple[Span, Span]:
    """Of queries, and of keys and values: the heads that this rank has of every layer."""
    q_first, q_end = parallel.span(shape.num_q_heads)
    kv_first, kv_end = head_range(shape.num_kv_heads, rank=parallel.rank, num_ranks=parallel.size)
    dim = shape.head_dim
    return (q_first * dim, q_end * dim), (kv_first * dim, kv_end * dim)


def _expected(config: HeadsConfig, shape: ModelConfig) -> Mapping[str, Shape]:
    hidden, features = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer: dict[str, Shape] = {
        **{f"{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "self_attn.q_proj.weight": (q_size, 2 * hidden),
        "self_attn.k_proj.weight": (kv_size, 2 * hidden),
        "self_attn.v_proj.weight": (kv_size, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (features, hidden),
        "mlp.up_proj.weight": (features, hidden),
        "mlp.down_proj.weight": (hidden, features),
    }
    tensors = {f"{_LAYER}.{name}": size for name, size in layer.items()}
    tensors |= {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,)}
    tensors["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if config.draft_vocab_size != shape.vocab_size:
        tensors["d2t"] = (config.draft_vocab_size,)
    return tensors
