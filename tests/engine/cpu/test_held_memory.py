"""Memory that a rank holds beside its packed matrices."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.cpu.library import Kernels
from engine.layers.packed_matrix import PackedMatrix
from engine.layers.shards import ShardReader
from engine.runner.parallel import TensorParallel
from engine.weights.checkpoint import SafetensorsCheckpoint
from engine.weights.open_checkpoint import open_checkpoint

VOCAB = 37


def write(directory: Path, **tensors: Tensor) -> Path:
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("num_features", [48, 51])
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_tied_embedding_is_held_once(kernels: Kernels, weights: str, num_features: int, tmp_path: Path) -> None:
    """The output matrix serves as the table, unless it is rounded to int8. Rows are those of the file either way."""
    stored = torch.randn(VOCAB, num_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    checkpoint = open_checkpoint(write(tmp_path, **{"embed.weight": stored}))
    parallel, cpu = TensorParallel(), torch.device("cpu")
    reader = ShardReader(checkpoint, parallel, torch.bfloat16, cpu, kernels, weights=weights)
    embedding, matrix = reader.tied(reader.embedding("embed", VOCAB))
    assert isinstance(matrix, PackedMatrix)
    assert (embedding.table is matrix) == (weights == "auto")
    token_ids = torch.tensor([36, 0, 15, 16, 16])
    assert torch.equal(embedding(token_ids), stored[token_ids])


def test_read_tensors_do_not_keep_their_file_mapped(tmp_path: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not list mappings")
    path = write(tmp_path, **{"w.weight": torch.ones(64, 64).bfloat16()}) / "model.safetensors"
    reader = ShardReader(SafetensorsCheckpoint(tmp_path), TensorParallel(), torch.bfloat16, torch.device("cpu"))
    embedding = reader.embedding("w", 64)
    tensors = [reader.tensor("w.weight"), reader.tensor("w.weight", rows=(0, 8)), embedding(torch.arange(8))]
    assert str(path) in maps.read_text()
    del reader
    gc.collect()
    assert str(path) not in maps.read_text()
    assert all(tensor.eq(1).all() for tensor in tensors)
