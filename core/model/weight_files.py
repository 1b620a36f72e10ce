"""Choice of a model directory's weight files, and the file of each tensor.

An index decides both. Without one, `model.safetensors` is the model; else the parts of one set named model-*; else
every .safetensors file, with each tensor in one of them. `consolidated*` and its index count only if nothing
else is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from core.model.config_file import ADAPTER, MERGE, has_own_format
from core.model.gguf_file import TABLE, read_table
from core.model.settings import read_object
from core.types.errors import SpecError

_MODEL = "model.safetensors"
_INDEX = f"{_MODEL}.index.json"
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})\.safetensors")
# The same weights in another form, or weights that are not the model's.
_SECOND_CHOICE = ("consolidated", "adapter_", "optimizer", "kv_basis")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class WeightFiles:
    """Weight files of a model directory. index: file of each tensor to read; None: read all tensors in the files.

    note: difference from the files that transformers would read; empty: none.
    """

    paths: tuple[Path, ...]
    index: Mapping[str, Path] | None = None
    note: str = ""


def weight_files(directory: Path) -> WeightFiles:
    """Choose the weight files of a model directory. Raises SpecError if there are none, or if some are missing."""
    if (directory / TABLE).exists():
        files = WeightFiles(tuple(sorted({Path(tensor.file) for tensor in read_table(directory)})))
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors") if not path.name.startswith("."))
        first = [name for name in names if not name.startswith(_SECOND_CHOICE)]
        files = _indexed(directory, first or names) or _listed(directory, first or names)
        if has_own_format(directory):
            files = replace(files, note="")  # transformers does not read it
        if (directory / ADAPTER).is_file():
            files = replace(files, note=f"the LoRA adapter beside the model is not applied; merge it first: {MERGE}")
    if missing := [str(file) for file in files.paths if not file.is_file()]:
        raise SpecError(f"{directory}: weight files are missing: {', '.join(missing)}; download them again")
    return files


def locate_tensors(files: WeightFiles) -> tuple[dict[str, Path], frozenset[str]]:
    """Return the safetensors file of each tensor to read, and the tensors that the index leaves out.

    Reads the headers. Raises SpecError for a truncated file, or if two files without an index hold the same tensor.
    """
    held: dict[str, list[Path]] = {}
    for path in files.paths:
        for name in _names(path):
            held.setdefault(name, []).append(path)
    if files.index is None:
        for name, paths in held.items():
            if len(paths) > 1:
                raise SpecError(
                    f"{paths[0].parent}: tensor {name} is in {' and '.join(path.name for path in paths)}; remove the "
                    f"files that do not belong to the model, or add its {_INDEX}"
                )
        return {name: path for name, (path,) in held.items()}, frozenset()
    located: dict[str, Path] = {}
    for name, indexed in files.index.items():
        paths = held.get(name, [])
        if indexed in paths or len(paths) == 1:  # the index may be wrong if only one file has the tensor
            located[name] = indexed if indexed in paths else paths[0]
        elif paths:
            found = " and ".join(path.name for path in paths)
            raise SpecError(f"{indexed}: has no tensor {name}, which the index expects there; it is in {found}")
    return located, frozenset(held.keys() - files.index.keys())


def _indexed(directory: Path, names: Sequence[str]) -> WeightFiles | None:
    """Return the files that the index names, or `model.safetensors` alone if some of those are missing.

    Returns None without an index.
    """
    indices = [path for path in directory.glob("*.safetensors.index*.json") if not path.name.startswith(".")]
    if not all(name.startswith(_SECOND_CHOICE) for name in names):
        indices = [path for path in indices if not path.name.startswith(_SECOND_CHOICE)]
    if len(indices) > 1:
        indices = [path for path in indices if path.name == _INDEX]
    if not indices or not names:
        return None
    (index,) = indices
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SpecError(f"{index}: weight_map is missing or empty; download the index again")
    for name in weight_map.values():
        if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise SpecError(f"{index}: weight_map names the file {name!r}; a file name in this directory is expected")
    file_of = {tensor: directory / name for tensor, name in weight_map.items()}
    paths = tuple(sorted(set(file_of.values())))
    missing = [path.name for path in paths if not path.exists()]
    whole = directory / _MODEL
    if missing and whole.exists() and whole not in paths:
        return WeightFiles((whole,), note=f"{index.name} names missing files ({', '.join(missing)}); read {_MODEL}")
    note = ""
    if whole.exists() and whole not in paths:
        note = f"read the files of {index.name}, where transformers reads {_MODEL}"
    elif index.name != _INDEX:
        note = f"read the files of {index.name}; transformers expects {_INDEX}"
    return WeightFiles(paths, file_of, note)


def _listed(directory: Path, names: Sequence[str]) -> WeightFiles:
    """Choose the files without an index. Raises SpecError if there are none, or if parts of a set are missing."""
    if _MODEL in names:
        return WeightFiles((directory / _MODEL,))
    if not names:
        raise SpecError(_no_weights(directory))
    sets: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if match := _PART.fullmatch(name):
            sets.setdefault((match["stem"], match["total"]), []).append(name)
    missing = {
        key: [part for i in range(int(key[1])) if (part := f"{key[0]}-{i + 1:05}-of-{key[1]}.safetensors") not in names]
        for key in sets
    }
    whole = [key for key in sets if key[0] == "model" and not missing[key]]
    chosen = sets[whole[0]] if len(whole) == 1 else names
    if absent := [part for key, parts in missing.items() if set(sets[key]) & set(chosen) for part in parts]:
        raise SpecError(f"{directory}: parts of the weights are missing: {', '.join(absent)}; download them again")
    left = [name for name in names if name not in chosen]
    note = f"read {', '.join(chosen)} without an index" + (f", and not {', '.join(left)}" if left else "")
    return WeightFiles(tuple(directory / name for name in chosen), note=f"{note}; transformers expects {_MODEL}")


def _no_weights(directory: Path) -> str:
    if pickled := sorted(path.name for path in directory.glob("*") if path.suffix in _PICKLED):
        return (
            f"{directory}: {pickled[0]} is pickled and not read; write safetensors with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
        )
    return f"{directory}: no weights: expected .safetensors files or a .gguf file"


def _names(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        try:
            with path.open("rb") as data:
                is_pointer = data.read(len(_LFS_POINTER)) == _LFS_POINTER
        except OSError as refusal:  # safetensors would call it a missing file
            raise SpecError(f"{path} cannot be opened: {refusal.strerror}; make it readable for this user") from None
        fix = "it is a Git LFS pointer: run `git lfs pull`" if is_pointer else "download it again"
        raise SpecError(f"{path}: not readable as safetensors: {error}; {fix}") from None
