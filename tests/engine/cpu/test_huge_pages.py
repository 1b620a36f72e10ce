"""Tensors in huge-page chunks: separate, aligned and populated."""

from __future__ import annotations

import mmap
import resource

import pytest
import torch
from torch import Tensor

from engine.cpu.huge_pages import HugePages, populate


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
