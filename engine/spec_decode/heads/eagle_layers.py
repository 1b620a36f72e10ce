"""EAGLE layers. EAGLE-3, over three fused hidden states of the model: Li et al. 2025, arXiv:2503.01840.

    f(t)   fc of the model's hidden states of position t after three of its layers
    entry  of token t: norm(embedding of token t) and norm(f(t - 1)), side by side
    layer  x = f + attention(entry); x + mlp(norm(x)); the logits of token t + 1 are head(norm(x))
    next   its own x, not normed, in the place of f

Variants (Eagle3Variant): a norm before fc, x = norm(f) + attention(entry), and norm(x) as the next feature.

EAGLE-1, over the model's last hidden state: Li et al. 2024, arXiv:2401.15077; EAGLE-2 uses the same heads.

    f(t)   the model's last hidden state of position t, normed, as its head reads it
    entry  of token t: fc of the embedding of token t and f(t - 1), side by side
    layer  a Llama layer without the norm before attention; the logits of token t + 1 are the model's head of its x
    next   its own x, in the place of f

EAGLE-1 is trained with the model's embedding and head, so copies of them in the checkpoint are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from core.model.draft_heads import Eagle3Variant, HeadsConfig
from core.model.shape import ModelConfig
from core.types.errors import SpecError
from engine.kv.pool import KVPool
from engine.layers.layers import Linear
from engine.layers.shards import ShardReader
from engine.spec_decode.heads.compiled_eagle import CompiledEagle, EagleParts, EntrySteps, can_compile
from engine.spec_decode.heads.deferred_kv import Entries
from engine.spec_decode.heads.draft_layer import DecoderBlock, DraftPlaces, expected_tensors
from engine.spec_decode.heads.heads import HeadsRoom
from engine.weights.checkpoint import Shape, check_tensors

# T tokens of a step, R rows, E hidden_size, D draft vocabulary

# Names of tensors in EAGLE-1's checkpoints.
_LAYER = "layers.0"
_COPIES = frozenset({"embed_tokens.weight", "lm_head.weight"})


class Eagle3Layer:
    """DraftLayer of EAGLE-3."""

    def __init__(self, config: HeadsConfig, model: ModelConfig, room: HeadsRoom) -> None:
        """Read the head. Raises SpecError if it does not fit config.json or the model."""
        reader, shape, variant = room.reader, config.shape, config.eagle3
        assert shape is not None and variant is not None
        self._variant = variant
        found = reader.checkpoint.shapes
        also = {"embed_tokens.weight": (model.vocab_size, shape.hidden_size), "d2t": (config.draft_vocab_size,)}
        expected = {**_expected(config, shape, variant), **{name: size for name, size in also.items() if name in found}}
        check_tensors(reader.checkpoint, expected, optional=frozenset({"t2d"}))
        eps = shape.rms_norm_eps
        self._fuse = reader.linear({"fc": (0, shape.hidden_size)})  # not split: every rank keeps the same features
        self._hidden_norms = [reader.norm(name, eps) for name in _hidden_norms(variant)]
        self._embedding_norm = reader.norm(f"{variant.layer}.input_layernorm", eps)
        self._feature_norm = reader.norm(f"{variant.layer}.hidden_norm", eps)
        self._block = DecoderBlock.read(reader, shape, variant.layer, index=len(model.kv_layers))
        self._norm = reader.norm("norm", eps)
        self._head = reader.linear({"lm_head": reader.parallel.span(config.draft_vocab_size)})
        self._gather = partial(reader.parallel.all_gather, total=config.draft_vocab_size)
        self._embed: Callable[[Tensor], Tensor] = room.model.embed
        if "embed_tokens.weight" in found:
            self._embed = reader.embedding("embed_tokens", model.vocab_size)
        self._compile = self._find_programs(reader, shape)
        self._compiled: CompiledEagle | None = None  # set by `attach`
        self._steps: EntrySteps | None = None  # of the current draft, if compiled
        self._logits_RD: Tensor | None = None  # of the last call, if compiled
        self.known_D: Tensor | None = None
        if "d2t" in found:
            offsets_D = reader.checkpoint.read("d2t").long()
            self.known_D = (offsets_D + torch.arange(len(offsets_D))).to(reader.device)
            if not 0 <= int(self.known_D.min()) <= int(self.known_D.max()) < model.vocab_size:
                raise SpecError(f"d2t: token ids out of range [0, {model.vocab_size})")

    def attach(self, pool: KVPool) -> None:
        self._pool = pool
        self._compiled = self._compile(pool) if self._compile else None

    def features(self, hidden_TW: Tensor) -> Tensor:
        if norms := self._hidden_norms:
            parts = hidden_TW.chunk(len(norms), dim=-1)
            hidden_TW = torch.cat([norm(part.contiguous()) for norm, part in zip(norms, parts, strict=True)], dim=-1)
        programs = self._for_few(len(hidden_TW))
        return programs.fuse(hidden_TW) if programs else self._fuse(hidden_TW)

    def keep(self, entries: Entries, before_NE: Tensor) -> None:
        slots_N, positions_N, token_ids_N = entries.slots_N, entries.positions_N, entries.token_ids_N
        if programs := self._for_few(len(slots_N)):
            angles = self._block.angles(positions_N, before_NE)
            programs.put(self._embed(token_ids_N), self._residual(before_NE), slots_N, *angles)
        else:
            self._block.keep(self._pool, slots_N, positions_N, self._entry(token_ids_N, before_NE))

    def __call__(self, places: DraftPlaces, place: int, token_ids_R: Tensor, before_RE: Tensor) -> Tensor:
        if programs := self._for_few(len(token_ids_R)):
            if place == 0:
                self._steps = EntrySteps(places, *self._block.angles(places.positions_PR.ravel(), before_RE))
            assert self._steps, "the first call of a draft must be for place 0"
            step = self._steps.at(place)
            x_RE, self._logits_RD = programs.draft(step, self._embed(token_ids_R), self._residual(before_RE))
        else:
            self._logits_RD = None
            entry_RI = self._entry(token_ids_R, before_RE)
            x_RE = self._block(places.batch(place), self._pool, entry_RI, self._residual(before_RE))
        return self._norm(x_RE) if self._variant.norm_output else x_RE

    def logits(self, feature_RE: Tensor) -> Tensor:
        if self._logits_RD is not None:
            return self._logits_RD.float()
        norm = None if self._variant.norm_output else self._norm
        return self._gather(self._head(feature_RE, before=norm)).float()

    def _for_few(self, num_tokens: int) -> CompiledEagle | None:
        """Return the compiled layer if it can compute this many tokens."""
        return self._compiled if self._compiled and num_tokens <= self._compiled.most_tokens else None

    def _find_programs(self, reader: ShardReader, shape: ModelConfig) -> Callable[[KVPool], CompiledEagle] | None:
        """Return a factory of the compiled layer; None if it is not supported."""
        if reader.kernels is None or reader.parallel.size > 1:
            return None
        block = self._block
        parts = EagleParts(
            fuse=self._fuse,
            embedding_norm=self._embedding_norm,
            feature_norm=None if self._variant.norm_before_residual else self._feature_norm,
            kv=_halves(reader, shape, f"{self._variant.layer}.self_attn", "kv"),
            qkv=_halves(reader, shape, f"{self._variant.layer}.self_attn", "qkv"),
            output=block.output,
            mlp_norm=block.mlp_norm,
            mlp=block.mlp,
            norm=self._norm,
            head=self._head,
        )
        if not can_compile(parts):
            return None
        return partial(CompiledEagle, reader.kernels, parts, attention=block.attention, dim=shape.head_dim)

    def _residual(self, before_TE: Tensor) -> Tensor:
        return self._feature_norm(before_TE) if self._variant.norm_before_residual else before_TE

    def _entry(self, token_ids_T: Tensor, before_TE: Tensor) -> Tensor:
        """Return the layer's input (T, 2 E)."""
        return torch.cat((self._embedding_norm(self._embed(token_ids_T)), self._feature_norm(before_TE)), dim=-1)


def _halves(reader: ShardReader, shape: ModelConfig, attention: str, names: str) -> tuple[Linear, Linear]:
    """Split the matrix that reads an entry into the columns of its embedding and those of its feature."""

    def half(number: int) -> Linear:
        columns = number * shape.hidden_size, (number + 1) * shape.hidden_size
        parts = [reader.checkpoint.read(f"{attention}.{n}_proj.weight", columns=columns) for n in names]
        return Linear(reader.matrix(torch.cat(parts).to(reader.dtype)))

    return half(0), half(1)


def _hidden_norms(variant: Eagle3Variant) -> list[str]:
    """Return the names of the norms before fc: one of all three hidden states, one of each, or none."""
    if variant.norm_before_fc:
        return ["input_norm"]
    return [f"fc_norm.{i}" for i in range(3)] if variant.fc_norm else []


def _expected(config: HeadsConfig, shape: ModelConfig, variant: Eagle3Variant) -> Mapping[str, Shape]:
    hidden, norms = shape.hidden_size, _hidden_norms(variant)
    tensors = {
        **expected_tensors(shape, variant.layer, entry_size=2 * hidden),
        **{f"{variant.layer}.{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")},
        **{f"{name}.weight": (3 * hidden // len(norms),) for name in norms},
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.draft_vocab_size != shape.vocab_size:
        tensors["d2t"] = (config.draft_vocab_size,)
    return tensors


class Eagle1Layer:
    """DraftLayer of EAGLE-1."""

    known_D: Tensor | None = None

    def __init__(self, config: HeadsConfig, model: ModelConfig, room: HeadsRoom) -> None:
        """Read the head. Raises SpecError if it does not fit config.json or the model."""
        reader, shape = room.reader, config.shape
        assert shape is not None
        found, hidden = reader.checkpoint.shapes, shape.hidden_size
        expected = {**expected_tensors(shape, _LAYER, entry_size=hidden), "fc.weight": (hidden, 2 * hidden)}
        # config.json does not list the biases.
        has_bias, has_qkv_bias = "fc.bias" in found, f"{_LAYER}.self_attn.q_proj.bias" in found
        biased = ["fc"] * has_bias + [f"{_LAYER}.self_attn.{name}_proj" for name in "qkv"] * has_qkv_bias
        expected |= {f"{name}.bias": expected[f"{name}.weight"][:1] for name in biased}
        check_tensors(reader.checkpoint, expected, optional=_COPIES)
        self._model = room.model
        self._join = reader.linear({"fc": (0, hidden)}, has_bias=has_bias)
        self._block = DecoderBlock.read(reader, shape, _LAYER, index=len(model.kv_layers), has_bias=has_qkv_bias)

    def attach(self, pool: KVPool) -> None:
        self._pool = pool

    def features(self, hidden_TW: Tensor) -> Tensor:
        return self._model.normed(hidden_TW)

    def keep(self, entries: Entries, before_NE: Tensor) -> None:
        entry_NE = self._entry(entries.token_ids_N, before_NE)
        self._block.keep(self._pool, entries.slots_N, entries.positions_N, entry_NE)

    def __call__(self, places: DraftPlaces, place: int, token_ids_R: Tensor, before_RE: Tensor) -> Tensor:
        entry_RE = self._entry(token_ids_R, before_RE)
        return self._block(places.batch(place), self._pool, entry_RE, entry_RE)

    def logits(self, feature_RE: Tensor) -> Tensor:
        return self._model.head(feature_RE)

    def _entry(self, token_ids_T: Tensor, before_TE: Tensor) -> Tensor:
        """Return the layer's input (T, E)."""
        return self._join(torch.cat((self._model.embed(token_ids_T), before_TE), dim=-1))
