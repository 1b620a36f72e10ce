"""Opening of a model directory's weights, in their format and under the names that models read.

A family's tensors are presented under Llama's names and shapes: renamed, split or unstacked.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from core.model.config import family_of, quantization_config
from core.model.config_file import has_own_format, read_config, stored_tensors
from core.model.families.family import Stored
from core.model.gguf_file import TABLE
from core.model.shape import ModelConfig
from core.model.weight_formats import INSTEAD, check_format, check_method
from core.types.errors import SpecError
from engine.weights.checkpoint import FLOATS, Checkpoint, SafetensorsCheckpoint, Shape, Span
from engine.weights.gguf_checkpoint import GGUFCheckpoint
from engine.weights.quantized_checkpoint import QuantizedCheckpoint
from engine.weights.quantized_weight import QuantizedWeight

logger = logging.getLogger(__name__)

# O outputs, I inputs, E experts

# Dtypes of buffers that old files keep beside the weights, such as position ids.
_COUNTERS = ("I64", "BOOL")
# Prefixes of the language model's tensors in a larger model or in Mistral's own format, and the names used here.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
    ("layers.", "model.layers."),
    ("backbone.", "model."),
)
# Tensors of the multi-token-prediction layer of Qwen and Nemotron, and DeepSeek's names for them, behind the last
# layer. Nemotron's experts are a second layer.
_PREDICTOR = (
    ("mtp.layers.0.", ""),
    ("mtp.layers.1.final_layernorm.", "shared_head.norm."),
    ("mtp.fc.", "eh_proj."),
    ("mtp.pre_fc_norm_embedding.", "enorm."),
    ("mtp.pre_fc_norm_hidden.", "hnorm."),
    ("mtp.norm.", "shared_head.norm."),
)
# The other parts of such a model.
TOWERS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|vision_embed_tokens|multi_modal_projector|mm_projector|audio_tower|"
    r"embed_vision|embed_audio|connector|patch_merger|vision_language_adapter|pre_mm_projector_norm|vision_encoder)\."
)
_SUFFIXES = (".weight", ".bias")


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Open the weights of a model directory for reading. Raises SpecError."""
    if (model_dir / TABLE).exists():
        return GGUFCheckpoint(model_dir)
    plain, config = SafetensorsCheckpoint(model_dir), quantization_config(model_dir)
    check_format(plain.shapes, has_own_format=has_own_format(model_dir))
    check_method(config)
    if config:
        return QuantizedCheckpoint(plain, config)
    coded = [
        name
        for name, kind in plain.dtypes.items()
        if kind not in FLOATS and (kind not in _COUNTERS or name.endswith(".weight"))
    ]
    if coded:
        kind = plain.dtypes[coded[0]]
        raise SpecError(f"{coded[0]} has dtype {kind}, and config.json has no quantization_config; {INSTEAD}")
    return plain


def open_model(model_dir: Path, config: ModelConfig) -> Checkpoint:
    """Open the weights of a model directory under the names that the model reads. Raises SpecError."""
    checkpoint = open_checkpoint(model_dir)
    if (model_dir / TABLE).exists():
        return checkpoint
    raw = read_config(model_dir)
    own = stored_tensors(is_latent=config.latent is not None) if has_own_format(model_dir) else ()
    stored = (*own, *family_of(raw).stored)
    renamed = RenamedCheckpoint(checkpoint, config, stored, is_nested="text_config" in raw)
    return renamed if renamed.is_needed else checkpoint


@dataclass(frozen=True)
class _Source:
    """Place of a tensor: every `step`-th row of a stored matrix, from `first` on, after its transposition.

    rotary_dim: head_dim of heads to reorder; 0: no reordering.
    """

    name: str
    first: int = 0
    step: int = 1
    expert: int | None = None
    is_transposed: bool = False
    rotary_dim: int = 0

    def order(self, num_rows: int) -> Tensor | None:
        """Return the rows to take from the stored matrix, (O,) int64; None if they are a contiguous range."""
        if self.rotary_dim:
            heads = torch.arange(num_rows).view(-1, self.rotary_dim // 2, 2)
            return heads.transpose(1, 2).flatten()
        return None if self.step == 1 else torch.arange(self.first, num_rows, self.step)


class RenamedCheckpoint:
    """Implements Checkpoint over another one. Tensors that no rule names keep their names."""

    def __init__(
        self, inner: Checkpoint, config: ModelConfig, stored: tuple[Stored, ...], *, is_nested: bool = False
    ) -> None:
        """is_nested: the language model is a part of the model; tensors of its other parts are skipped."""
        self._inner = inner
        self._config = config
        others = "dense" if config.experts else "sparse"
        self._rules = [(re.compile(rf"(.*\.)?{rule.pattern}"), rule) for rule in stored if rule.of != others]
        layers = [f"model.layers.{config.num_layers + i}." for i in range(2)]
        predictor = ((name, layers[0] + ours) for name, ours in _PREDICTOR)
        self._prefixes = (*_PREFIXES, *predictor, ("mtp.layers.1.", layers[1]))
        self._sources: dict[str, _Source] = {}
        self.shapes: dict[str, Shape] = {}
        towers = list[str]()
        for name, shape in inner.shapes.items():
            if is_nested and TOWERS.match(name):
                towers.append(name)
                continue
            for ours, source, part in self._located(name, shape):
                if ours in self.shapes:
                    raise SpecError(f"{ours} is in the files twice, as {self.stored(ours)} and as {name}")
                self.shapes[ours] = part
                if source is not None:
                    self._sources[ours] = source
        self.unindexed: Collection[str] = {ours for name in inner.unindexed for ours, _, _ in self._located(name, None)}
        if towers:
            kinds = ", ".join(sorted({match[0].removesuffix(".") for name in towers if (match := TOWERS.match(name))}))
            logger.info("text model only: %d tensors of %s are not read", len(towers), kinds)

    @property
    def is_needed(self) -> bool:
        return bool(self._sources) or self.shapes != self._inner.shapes

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        source = self._sources.get(name)
        if source is None:
            return self._inner.read(name, rows=rows, columns=columns)
        if source.expert is not None:
            whole = self._inner.read(source.name, rows=(source.expert, source.expert + 1))[0]
            whole = whole.T if source.is_transposed else whole
            start, end = rows or (0, self.shapes[name][0])
            part = whole[source.first :: source.step][start:end]
            return part if columns is None else part[:, slice(*columns)]
        order = source.order(self._inner.shapes[source.name][0])
        if order is None:
            return self._inner.read(source.name, rows=self._inner_rows(name, source, rows), columns=columns)
        return self._inner.read(source.name, columns=columns)[order[slice(*rows or (None,))]]

    def is_quantized(self, name: str) -> bool:
        return self._inner.is_quantized(self.stored(name))

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> QuantizedWeight | None:
        source = self._sources.get(name)
        if source is None:
            return self._inner.quantized(name, rows=rows, columns=columns)
        if source.expert is not None:
            return None
        order = source.order(self._inner.shapes[source.name][0])
        if order is None:
            return self._inner.quantized(source.name, rows=self._inner_rows(name, source, rows), columns=columns)
        whole = self._inner.quantized(source.name, columns=columns)
        return None if whole is None else whole.select(order[slice(*rows or (None,))])

    def _inner_rows(self, name: str, source: _Source, rows: Span | None) -> Span:
        start, end = rows or (0, self.shapes[name][0])
        return source.first + start, source.first + end

    def stored(self, name: str) -> str:
        """Return the name of the stored tensor that holds `name`."""
        return self._sources[name].name if name in self._sources else name

    def _located(self, name: str, shape: Shape | None) -> Iterator[tuple[str, _Source | None, Shape]]:
        """Yield the model's names for a stored tensor, with the place and the shape of each.

        No place: the tensor keeps its name. shape: None for a tensor that is not read, where only the names matter.
        """
        ours = next((to + name.removeprefix(start) for start, to in self._prefixes if name.startswith(start)), name)
        stem, suffix = _split(ours)
        match, rule = next(((m, rule) for pattern, rule in self._rules if (m := pattern.fullmatch(stem))), (None, None))
        if match is None or rule is None:
            yield ours, None if ours == name else _Source(name), shape or ()
            return
        prefix, groups = match[1] or "", match.groups()[1:]
        template = prefix + rule.name
        if groups:
            template = template.replace("{e}", groups[0]).replace("{0}", groups[0])
        if shape is None:
            yield template.replace("{}", rule.parts[0] if rule.parts else "") + suffix, _Source(name), ()
            return
        self._check_dimensions(name, shape, rule, is_bias=suffix == ".bias")
        experts = range(shape[0]) if rule.has_experts else [None]
        inner = shape[1:] if rule.has_experts else shape
        source = _Source(name, is_transposed=suffix != ".bias" and self._is_transposed(rule, inner))
        inner = inner[::-1] if source.is_transposed else inner
        layer = int(found[1]) if (found := re.search(r"layers\.(\d{1,9})\.", prefix)) else 0
        layer = min(layer, self._config.num_layers - 1)
        for part, first, num_rows in self._parts(rule, inner, name, layer):
            dim = self._config.layers[layer].head_dim if rule.split == "rotary" else 0
            for expert in experts:
                full = template.replace("{}", part)
                if expert is not None:
                    full = full.replace("{e}", str(expert))
                yield (
                    full + (suffix or ".weight" if rule.has_experts else suffix),
                    replace(
                        source,
                        first=first,
                        step=len(rule.parts) if rule.split == "pairs" else 1,
                        expert=expert,
                        rotary_dim=dim,
                    ),
                    (num_rows, *inner[1:]),
                )

    def _is_transposed(self, rule: Stored, inner: Shape) -> bool:
        """Return True if a stored matrix is (I, O), by its rule or by the experts' sizes."""
        if rule.is_transposed or not rule.has_experts or not self._config.experts:
            return rule.is_transposed
        hidden, size = self._config.hidden_size, self._config.experts.intermediate_size
        expected = (len(rule.parts) * size, hidden) if rule.parts else (hidden, size)
        return inner != expected and inner == expected[::-1]

    def _check_dimensions(self, name: str, shape: Shape, rule: Stored, *, is_bias: bool) -> None:
        """Raise SpecError unless a fused or stacked tensor holds a matrix, or a bias, of every expert."""
        if not (rule.has_experts or rule.parts or rule.split == "rotary"):
            return
        num_dimensions = (1 if is_bias else 2) + rule.has_experts
        if len(shape) != num_dimensions:
            raise SpecError(f"{name} is {shape}, and must have {num_dimensions} dimensions")
        num_experts = self._config.experts.num_experts if self._config.experts else 0
        if rule.has_experts and shape[0] != num_experts:
            raise SpecError(f"{name} is {shape}: {shape[0]} experts, but config.json has {num_experts}")

    def _parts(self, rule: Stored, inner: Shape, name: str, layer: int) -> Iterator[tuple[str, int, int]]:
        """Yield the parts of a stored matrix, the first row of each, and the number of its rows."""
        num_rows = inner[0]
        if not rule.parts:
            yield "", 0, num_rows
            return
        if rule.split == "pairs":
            if num_rows % len(rule.parts):
                raise SpecError(f"{name} has {num_rows} rows, and must have an even number: two parts alternate")
            for index, part in enumerate(rule.parts):
                yield part, index, num_rows // len(rule.parts)
            return
        sizes = [num_rows // len(rule.parts)] * len(rule.parts)
        if rule.split == "qkv":
            shape = self._config.layers[layer]
            sizes = [heads * shape.head_dim for heads in (self._config.num_q_heads, *(shape.num_kv_heads,) * 2)]
        if sum(sizes) != num_rows:
            raise SpecError(f"{name} has {num_rows} rows, but {', '.join(rule.parts)} need {sum(sizes)}")
        start = 0
        for part, size in zip(rule.parts, sizes, strict=True):
            yield part, start, size
            start += size


def _split(name: str) -> tuple[str, str]:
    """Split off `.weight` or `.bias`; tensors of all experts have `_bias` or nothing."""
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return (name.removesuffix("_bias"), ".bias") if name.endswith("_proj_bias") else (name, "")
