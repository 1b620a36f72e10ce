"""Checksum of KV bytes on a link. It detects accidental corruption, not attacks; for those see docs/SECURITY.md.

sum over i of word[i] * (2 i + 1)  mod 2^64          over 8-byte words, the last one padded with zeros
"""

from __future__ import annotations

from ctypes import byref
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from engine.cpu.library import Kernels, open_copies
from engine.cpu.structs import Payload
from engine.kernels.language import cdiv, jit, tl

# Words per program.
_BLOCK = 4096


def checksum(payload: Tensor) -> int:
    """Return a payload's checksum, computed on its device. Any one-word change alters it."""
    if payload.is_cuda:
        return int(launch_word_sum(payload)) % 2**64
    num_whole = payload.numel() // 8 * 8
    words = payload[:num_whole]
    if kernels := open_copies(payload.device):
        total = sum_words(kernels, words)
    else:
        count = num_whole // 8
        total = int((words.view(torch.int64) * _odd_numbers_at_least(1 << count.bit_length())[:count]).sum())
    tail = bytes(payload[num_whole:].numpy())
    return (total + int.from_bytes(tail, "little") * (num_whole // 4 + 1)) % 2**64


def sum_words(kernels: Kernels, words: Tensor) -> int:
    """Return the sum with the CPU kernels. words: contiguous uint8, whole 8-byte words."""
    payload = Payload(bytes=words.data_ptr(), num_words=words.numel() // 8)
    kernels.add_up_payload(byref(payload))
    return int(payload.sum)


@lru_cache(maxsize=16)
def _odd_numbers_at_least(count: int) -> Tensor:
    """Return the odd weights. Host memory, shared by the threads of all links; not bound to a CUDA stream."""
    return torch.from_numpy(np.arange(count, dtype=np.int64) * 2 + 1)


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
