"""Tensors that lie beside each other in chunks are each other's neighbours, and nothing more."""

from __future__ import annotations

import torch

from engine.cpu.huge_pages import HugePages


def test_copies_hold_their_numbers_and_begin_at_a_line() -> None:
    memory = HugePages()
    given = [
        torch.full((count, 3), count % 100, dtype=dtype)
        for count in (1, 7, 1 << 20)
        for dtype in (torch.int8, torch.float32)
    ]
    given.append(torch.zeros(20 << 20, dtype=torch.uint8))  # what is left of a chunk has no room for it
    copies = [memory.copy(tensor) for tensor in given]
    for tensor, copied in zip(given, copies, strict=True):
        torch.testing.assert_close(copied, tensor, atol=0, rtol=0)
        assert copied.data_ptr() % 64 == 0
    copies[1].fill_(-1)
    torch.testing.assert_close(copies[0], given[0], atol=0, rtol=0)
    torch.testing.assert_close(copies[2], given[2], atol=0, rtol=0)
