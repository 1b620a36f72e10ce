"""The checksum of KV bytes on a link. It finds accidents; what keeps others out is said in docs/SECURITY.md."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from engine.cpu.library import open_copies
from engine.cpu.wire import sum_words
from engine.kernels.checksum import launch_word_sum


def checksum(payload: Tensor) -> int:
    """Return a 64-bit sum over 8-byte words that depends on their order; runs on the payload's device.

    sum over i of word[i] * (2 i + 1)  mod 2^64, with the last word padded with zeros. Any one-word change alters it.
    """
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


@lru_cache(maxsize=16)
def _odd_numbers_at_least(count: int) -> Tensor:
    """Return the odd weights. Host memory shared by the threads of all links, bound to no CUDA stream."""
    return torch.from_numpy(np.arange(count, dtype=np.int64) * 2 + 1)
