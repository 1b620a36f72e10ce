"""The checksum of KV bytes on a link. It finds accidents; what keeps others out is said in docs/SECURITY.md."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from engine import streams
from engine.cpu.library import open_copies
from engine.cpu.wire import sum_words


def checksum(payload: Tensor) -> int:
    """A 64-bit sum that changes with any one 8-byte word and with the order of words; runs on the payload's device.

    sum over i of word[i] * (2 i + 1)  mod 2^64        the last word padded with zeros
    """
    num_whole = payload.numel() // 8 * 8
    words = payload[:num_whole]
    if kernels := open_copies(payload.device):
        total = sum_words(kernels, words)
    else:
        count = num_whole // 8
        odd_numbers = _odd_numbers_at_least(1 << count.bit_length(), payload.device)[:count]
        total = int((words.view(torch.int64) * odd_numbers).sum())
    if num_whole == payload.numel():
        return total % 2**64
    tail = bytes(payload[num_whole:].cpu().numpy())
    return (total + int.from_bytes(tail, "little") * (num_whole // 4 + 1)) % 2**64


@lru_cache(maxsize=16)
def _odd_numbers_at_least(count: int, device: torch.device) -> Tensor:
    numbers = torch.arange(count, dtype=torch.int64, device=device) * 2 + 1
    streams.streams_of(device).synchronize()  # links use them on streams of their own
    return numbers
