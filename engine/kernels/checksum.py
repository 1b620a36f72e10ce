"""Checksum kernel: sum over i of word[i] * (2 i + 1)  mod 2^64, over 8-byte words, the last one padded with zeros."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.language import cdiv, jit, tl

# Words per program.
_BLOCK = 4096


def launch_word_sum(payload: Tensor) -> Tensor:
    """Sum a payload: contiguous uint8, 8-byte aligned. Returns (1,) int64 on its device."""
    total = torch.zeros(1, dtype=torch.int64, device=payload.device)
    num_words = payload.numel() // 8
    words, tail = payload[: num_words * 8].view(torch.int64), payload[num_words * 8 :]
    grid = (max(1, cdiv(num_words, _BLOCK)),)
    _word_sum[grid](words, tail, total, num_words, tail.numel(), BLOCK=_BLOCK)
    return total


@partial(jit, do_not_specialize=["num_words", "num_tail"], anywhere=["tail"])
def _word_sum(
    words: tl.tensor, tail: tl.tensor, total: tl.tensor, num_words: tl.tensor, num_tail: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program: BLOCK words; the first program adds the bytes after the last whole word. Sums wrap mod 2^64."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(words + i, mask=i < num_words, other=0) * (2 * i + 1))
    if tl.program_id(0) == 0:
        b = tl.arange(0, 8)
        last = tl.sum(tl.load(tail + b, mask=b < num_tail, other=0).to(tl.int64) << (8 * b).to(tl.int64))
        part += last * (2 * num_words.to(tl.int64) + 1)
    tl.atomic_add(total, part)
