"""Bases in which int4 pools keep keys and values, for each layer and KV head.

    stored key = k A        stored query = q inverse(A)^T        their product is q . k
    stored value = v B      output = stored output inverse(B)

int4 rounds all numbers of a row in steps of one size. In a suitable basis these errors change scores and outputs less
than in the model's own. `engine.quantization.kv_calibration` finds the bases and writes them to a file of the model
directory, whose hash is part of the layout's fingerprint: replicas that use other bases do not exchange KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from core.model import config as model_config
from core.process.atomic_file import move_whole
from core.types.errors import SpecError
from engine.kv.layout import KVLayout

# T tokens, N heads, K kv heads, M heads per KV head times tokens, D head_dim

FILE = "kv_basis.safetensors"
_AGAIN = "run `cluster calibrate` again"


class KVBasis(NamedTuple):
    """Matrices of one layer's KV heads on one rank, (K, D, D) fp32, contiguous; each multiplies rows from the right."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    outputs: Tensor

    @classmethod
    def of(cls, keys_KDD: Tensor, values_KDD: Tensor, device: torch.device) -> KVBasis:
        """Complete the matrices with their inverses, computed in double precision on the host. Raises LinAlgError."""
        queries_KDD = torch.linalg.inv(keys_KDD.double()).mT
        outputs_KDD = torch.linalg.inv(values_KDD.double())
        return cls(*(x.float().contiguous().to(device) for x in (keys_KDD, values_KDD, queries_KDD, outputs_KDD)))

    def of_heads(self, q_TND: Tensor, k_TND: Tensor, v_TND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert rotated queries and keys, and values, to this basis."""
        return change_basis(q_TND, self.queries), change_basis(k_TND, self.keys), change_basis(v_TND, self.values)


def change_basis(x_TND: Tensor, basis_KDD: Tensor) -> Tensor:
    """Multiply heads by their KV head's matrix in fp32. Returns the dtype of x, contiguous."""
    num_tokens, _, dim = x_TND.shape
    x_KMD = torch.unflatten(x_TND.float(), 1, (len(basis_KDD), -1)).transpose(0, 1).reshape(len(basis_KDD), -1, dim)
    y_KTND: Tensor = (x_KMD @ basis_KDD).view(len(basis_KDD), num_tokens, -1, dim)
    return y_KTND.transpose(0, 1).flatten(1, 2).to(x_TND.dtype)


@dataclass(frozen=True)
class StoredBases:
    """Open file of bases. Layers are counted as in the pool."""

    file: Any
    layout: KVLayout

    def of(self, layer: int, *, rank: int, device: torch.device) -> KVBasis | None:
        """Read the basis of a layer's heads on `rank`; None for a layer that is not quantized. Raises SpecError."""
        if layer in self.layout.plain_layers:
            return None
        first, end = self.layout.head_range(layer, rank=rank)
        dim, parts = self.layout.heads[layer].head_dim, []
        for side in ("keys", "values"):
            name, shape = f"{layer}.{side}", [self.layout.kv_heads[layer], dim, dim]
            stored_KDD = self.file.get_slice(name) if name in self.file.keys() else None
            found = "missing" if stored_KDD is None else stored_KDD.get_shape()
            if stored_KDD is None or found != shape:
                raise SpecError(f"{FILE}: {name} is {found}, not {shape}; {_AGAIN}")
            parts.append(stored_KDD[first:end])
        try:
            basis = KVBasis.of(parts[0], parts[1], device)
        except torch.linalg.LinAlgError:
            basis = None
        if basis is None or not all(bool(matrix_KDD.isfinite().all()) for matrix_KDD in basis):
            raise SpecError(f"{FILE}: the matrices of layer {layer} have no finite inverse; {_AGAIN}")
        return basis


def open_bases(model_dir: Path, layout: KVLayout) -> StoredBases | None:
    """Open a model's bases; None if its pool needs none or has none.

    Raises SpecError if they belong to another model, or differ from those in the layout's fingerprint.
    """
    if not layout.basis:
        return None
    try:
        file = safe_open(model_dir / FILE, framework="pt")
    except (OSError, SafetensorError) as error:
        raise SpecError(f"{model_dir / FILE}: cannot be read: {error}") from error
    if ((file.metadata() or {}).get("model")) != model_config.fingerprint(model_dir):
        raise SpecError(f"{model_dir / FILE} was calibrated for other weights; {_AGAIN}")
    # Check after opening: a file that is written later does not replace the opened one.
    if fingerprint_of_bases(model_dir) != layout.basis:
        raise SpecError(f"{model_dir / FILE} was replaced while the replica started; start it again")
    return StoredBases(file, layout)


def write_bases(model_dir: Path, bases: Mapping[str, Tensor]) -> Path:
    """Write matrices `LAYER.keys` and `LAYER.values`, (K, D, D), atomically. Raises SpecError if it cannot."""
    path, unfinished = model_dir / FILE, model_dir / f".{FILE}"
    data = save(dict(bases), metadata={"model": model_config.fingerprint(model_dir)})
    try:
        unfinished.write_bytes(data)
        move_whole(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise SpecError(f"{path} cannot be written: {error.strerror}; free space or correct permissions") from error
    return path


def fingerprint_of_bases(model_dir: Path) -> str:
    """Return the hash of a model's file of bases, empty without one. Raises SpecError if it cannot be read."""
    try:
        with (model_dir / FILE).open("rb") as file:
            return file_digest(file, "blake2b").hexdigest()[:32]
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SpecError(
            f"{model_dir / FILE} cannot be read: {error.strerror}; make it readable for this user"
        ) from error
