"""Memory of CPU ranks: tensors in huge pages, and what is held beside packed matrices."""

from __future__ import annotations

import gc
import mmap
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.cpu.huge_pages import HugePages, populate
from engine.cpu.library import Kernels
from engine.layers.packed_matrix import PackedMatrix
from engine.layers.shards import ShardReader
from engine.runner.parallel import TensorParallel
from engine.weights.checkpoint import SafetensorsCheckpoint
from engine.weights.open_checkpoint import open_checkpoint


def test_copies_are_equal_and_line_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cpu.huge_pages._CHUNK", 32 << 20)
    memory = HugePages()
    given = [
        torch.full((count, 3), count % 100, dtype=dtype)
        for count in (1, 7, 1 << 20)
        for dtype in (torch.int8, torch.float32)
    ]
    # Does not fit the rest of a chunk.
    given.append(torch.zeros(20 << 20, dtype=torch.uint8))
    copies = [memory.copy(tensor) for tensor in given]
    for tensor, copied in zip(given, copies, strict=True):
        torch.testing.assert_close(copied, tensor, atol=0, rtol=0)
        assert copied.data_ptr() % 64 == 0
    copies[1].fill_(-1)
    torch.testing.assert_close(copies[0], given[0], atol=0, rtol=0)
    torch.testing.assert_close(copies[2], given[2], atol=0, rtol=0)


def test_populated_tensor_is_mapped_and_unchanged() -> None:
    def num_faults(tensor: Tensor) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        tensor[:: mmap.PAGESIZE] += 1
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    # Not from malloc, whose memory may already be mapped.
    untouched, populated = (torch.frombuffer(mmap.mmap(-1, 40 << 20), dtype=torch.uint8) for _ in range(2))
    populated[5 << 20] = 7
    populate([populated, torch.empty(0), torch.ones(3)])
    if not (expected := num_faults(untouched)):
        pytest.skip("this kernel does not count page faults")
    assert expected >= 20, "expected at least 20 faults: 20 huge pages or 10,240 small ones"
    assert num_faults(populated) < 10
    assert populated[5 << 20] == 8
    assert int(populated.sum()) == (40 << 20) // mmap.PAGESIZE + 7


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
