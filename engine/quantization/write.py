"""Writer of quantized checkpoints: quantizes the matrices of the layers and copies everything else."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from core.model import config as model_config
from core.model.config_file import has_own_format, read_config
from core.model.gguf_file import TABLE
from core.types.errors import SpecError
from engine.quantization.channel_scales import ChannelScales, SchemeFor, find_folds, find_scales
from engine.quantization.formats import FORMATS, WrittenFormat, round_matrix
from engine.weights.checkpoint import Checkpoint
from engine.weights.open_checkpoint import TOWERS, RenamedCheckpoint, open_checkpoint, open_model

_FILE_BYTES = 4 << 30
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Matrices of attention, MLPs and experts.
_MATRICES = ("_proj", ".w1", ".w2", ".w3", ".kv_a_proj_with_mqa")
# Matrices that engines fuse, and that therefore share a global scale.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
_GROUPS = (128, 64, 32, 16)
# Smaller groups, whose scales cost a bit or more per weight, are not chosen by default.
_LEAST_GROUP = 32
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def quantize_checkpoint(
    model_dir: Path,
    into: Path,
    kind: str,
    *,
    group: int | None = None,
    calibrate: Callable[[], Mapping[str, Tensor]] = dict,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write a checkpoint in a public format, one of FORMATS, with tokenizer and configs.

    into: a new directory; it appears when it is complete. group: inputs per scale, for formats that let it be chosen;
    0: whole rows; None: the format's, or the largest of 64 and 32 that divides all inputs. calibrate: returns the Gram
    matrices of inputs (calibration.inputs_of) once all checks have passed; matrices not in it are rounded to nearest.
    say: receives lines of progress. Holds one file's tensors in memory (up to 4 GiB). Raises SpecError.
    """
    if (form := FORMATS.get(kind)) is None:
        raise SpecError(f"unknown quantization format {kind!r}; choose one of {', '.join(FORMATS)}")
    if group is not None and not form.has_group_option:
        raise SpecError(f"{kind} has a fixed group size; leave --group out, or choose int4")
    if model_config.quantization_config(model_dir):
        raise SpecError(f"{model_dir} is already quantized; use the unquantized checkpoint")
    if has_own_format(model_dir):
        raise SpecError(f"{model_dir}: Mistral's own format is not quantized; use model*.safetensors and config.json")
    raw, config = read_config(model_dir), model_config.load(model_dir)
    dtype = _DTYPES.get(config.dtype, torch.float32)
    source = _Source(open_checkpoint(model_dir), form, form.group if group is None else group, dtype)
    source.check_experts()
    if line := source.fit_group(kind, is_given=group is not None):
        say(line)
    if os.path.lexists(into):
        raise SpecError(f"{into} already exists")
    _check_space(into, source.num_bytes)
    unfinished = into.with_name(f"{into.name}.unfinished")
    if os.path.lexists(unfinished):
        raise SpecError(f"{unfinished} exists, from a run that was interrupted or still runs; delete it")
    source.grams = by_stored_name(open_model(model_dir, config), calibrate())
    if source.grams and form.scales_channels:
        folds = find_folds(source.stems, config)
        say("searching the scales of input channels")
        source.scales = find_scales(folds, source.checkpoint.read, source.scheme_for, source.grams)
    try:
        # Not deleted if this fails: another run may write there since the check.
        unfinished.mkdir(parents=True)
        try:
            _write(model_dir, unfinished, source, say)
            written = raw | {"quantization_config": form.config(source.group, source.exact)}
            (unfinished / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
            unfinished.rename(into)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise SpecError(f"{into}: cannot be written: {error}") from error


@dataclass
class _Source:
    """Unquantized checkpoint with the settings for its matrices. dtype: the model's."""

    checkpoint: Checkpoint
    format: WrittenFormat
    # Inputs per scale; 0: whole rows.
    group: int
    dtype: torch.dtype
    grams: Mapping[str, Tensor] = field(default_factory=dict)
    scales: ChannelScales = field(default_factory=ChannelScales)

    @cached_property
    def stems(self) -> list[str]:
        return [name.removesuffix(".weight") for name in self.checkpoint.shapes if name.endswith(".weight")]

    @cached_property
    def matrices(self) -> frozenset[str]:
        """Names of the matrices to quantize, without `.weight`."""
        return frozenset(
            stem for stem in self.stems if ".layers." in stem and stem.endswith(_MATRICES) and not TOWERS.match(stem)
        )

    @property
    def exact(self) -> Sequence[str]:
        """Modules with a matrix that is not quantized: the head, routers."""
        others = [stem for stem in self.stems if stem not in self.matrices and not stem.endswith("embed_tokens")]
        return sorted({"lm_head", *(stem for stem in others if len(self.checkpoint.shapes[f"{stem}.weight"]) == 2)})

    @property
    def scheme_for(self) -> SchemeFor:
        return partial(self.format.scheme, group=self.group, dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        """Upper bound of the written bytes, with fp32 scales."""
        total = 0
        for name, shape in self.checkpoint.shapes.items():
            numbers = math.prod(shape)
            if name.removesuffix(".weight") in self.matrices:
                scales = shape[0] * -(-shape[1] // (self.group or shape[1]))
                total += numbers * self.format.bits // 8 + scales * 4
            else:
                total += numbers * self.dtype.itemsize
        return total

    def check_experts(self) -> None:
        """Raise SpecError for stacked experts."""
        for name, shape in self.checkpoint.shapes.items():
            if ".experts." in name and len(shape) > 2:
                raise SpecError(
                    f"{name} stacks the experts in one tensor; save them as one matrix per "
                    "expert, or set model.weights: int8, which quantizes while loading"
                )

    def fit_group(self, kind: str, *, is_given: bool) -> str:
        """Replace a default group that does not divide the inputs of every matrix, and return a line about it.

        Raises SpecError if a given group does not divide them, or no group does.
        """
        widths = {self.checkpoint.shapes[f"{stem}.weight"][1]: stem for stem in sorted(self.matrices)}
        width = next((width for width in widths if self.group and width % self.group), None)
        if width is None or self.format.rows > 1:
            return ""
        line = f"{widths[width]} has {width} inputs, which {kind}'s groups of {self.group} do not divide"
        fits = [size for size in _GROUPS if not any(other % size for other in widths)]
        if not fits or not self.format.has_group_option:
            raise SpecError(f"{line}; use --to fp8 or int8")
        if is_given or fits[0] < _LEAST_GROUP:
            raise SpecError(f"{line}; use --group {fits[0]}")
        self.group = fits[0]
        return f"{line}: using groups of {self.group}"

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors to write for a source tensor: itself or a matrix's parts, with channel scales applied."""
        stored = self.checkpoint.read(name)
        tensor = self.scales.apply(name, stored)
        stem, _, last = name.rpartition(".")
        if last != "weight" or stem not in self.matrices:
            is_gguf = self.checkpoint.quantized(name) is not None
            return {name: tensor.to(self.dtype if is_gguf else stored.dtype)}
        if not bool(tensor.isfinite().all()):
            raise SpecError(f"{name} has a value that is not a finite number; download the file again")
        scheme = self.scheme_for(self._most(stem, tensor))
        gram_II = self.grams.get(stem)
        coded = round_matrix(tensor, scheme, None if gram_II is None else self.scales.gram(stem, gram_II))
        return {f"{stem}.{suffix}": part for suffix, part in self.format.parts(coded, scheme).items()}

    def _most(self, stem: str, weight_OI: Tensor) -> Tensor:
        """Return the largest magnitude of a matrix and of those that engines fuse with it."""
        owner, _, last = stem.rpartition(".")
        fused = next((names for names in _FUSED if last in names), ()) if self.format.has_global_scale else ()
        others = [other for part in fused if part != last and (other := f"{owner}.{part}") in self.matrices]
        names = [f"{other}.weight" for other in others]
        scaled = [self.scales.apply(name, self.checkpoint.read(name)) for name in names]
        return torch.stack([weight.abs().max().float() for weight in (weight_OI, *scaled)]).max()


def by_stored_name(checkpoint: Checkpoint, grams: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Rename Gram matrices from the model's names to the files'; the parts of a fused matrix have equal ones."""
    if not isinstance(checkpoint, RenamedCheckpoint):
        return grams
    return {checkpoint.stored(f"{stem}.weight").removesuffix(".weight"): gram for stem, gram in grams.items()}


def _write(model_dir: Path, into: Path, source: _Source, say: Callable[[str], None]) -> None:
    for file in model_dir.glob("*"):
        if file.is_file() and file.suffix not in (".safetensors", ".gguf") and ".index." not in file.name:
            if file.name not in (TABLE, "config.json"):
                shutil.copy(file, into)
    batch: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(file_of.values())) + 1:05}.safetensors"
        save_file(batch, into / name, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(batch, name))
        batch.clear()

    names = sorted(source.checkpoint.shapes, key=_layer)
    num_layers = len({_layer(name) for name in names} - {-1})
    for layer, named in groupby(names, _layer):
        for name in named:
            batch |= {written: tensor.contiguous() for written, tensor in source.tensors(name).items()}
            if sum(part.nbytes for part in batch.values()) > _FILE_BYTES:
                flush()
        if layer >= 0:
            say(f"layer {layer + 1} of {num_layers} quantized")
    flush()
    index = {"metadata": {}, "weight_map": file_of}
    index_file = into / "model.safetensors.index.json"
    index_file.write_text(json.dumps(index, indent=2), encoding="utf-8")
    # safetensors lets only the owner read its files.
    for name in set(file_of.values()):
        (into / name).chmod(index_file.stat().st_mode)


def _layer(name: str) -> int:
    """Return the layer of a tensor; -1 outside of layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def _check_space(into: Path, num_bytes: int) -> None:
    parent = next(parent for parent in into.absolute().parents if os.path.exists(parent))
    free = shutil.disk_usage(parent).free
    if num_bytes > free:
        raise SpecError(
            f"{into} needs {num_bytes / 2**20:,.0f} MiB, and {parent} has {free / 2**20:,.0f} MiB free; "
            "free some, or write to another disk"
        )
