"""KV packing between pool and payload with the CPU kernels, on the calling thread without the GIL; see wire.h."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from engine.cpu.library import Kernels
from engine.cpu.structs import Coding, Payload, PoolView, Wire

# T tokens, B blocks, P kv heads of the pool, K transferred heads, S block_size, D head_dim; 2: keys, then values


def can_carry(pool_B2PSD: Tensor, *, is_quantized: bool) -> bool:
    """Return True if the kernels support this pool. Raw: any dtype; quantized: bf16 pools only."""
    return pool_B2PSD.dtype == torch.bfloat16 or not is_quantized


def wire_of(pool_B2PSD: Tensor, slots_T: Tensor, heads: slice, codes_T2KD: Tensor, scales_T2K: Tensor | None) -> Wire:
    """Build the argument of `Kernels.pack_wire` and `unpack_wire`; arguments as engine.kernels.kv_wire.pack_kv."""
    num_tokens, _, num_heads, row_dim = codes_T2KD.shape
    assert pool_B2PSD.is_contiguous() and codes_T2KD.is_contiguous() and slots_T.is_contiguous()
    assert len(slots_T) == num_tokens and slots_T.dtype == torch.int64
    wire = Wire(
        pool=PoolView(
            codes=pool_B2PSD.data_ptr(),
            kv_heads=pool_B2PSD.shape[2],
            block_size=pool_B2PSD.shape[3],
            head_dim=pool_B2PSD.shape[4],
        ),
        coding=Coding.PLAIN if scales_T2K is None else Coding.of(codes_T2KD.dtype),
        row_bytes=row_dim * codes_T2KD.element_size(),
        codes=codes_T2KD.data_ptr(),
        scales=None if scales_T2K is None else scales_T2K.data_ptr(),
        slots=slots_T.data_ptr(),
        tokens=num_tokens,
        first_head=heads.start,
        heads=num_heads,
    )
    # The struct holds their addresses only.
    wire.tensors = pool_B2PSD, slots_T, codes_T2KD, scales_T2K
    return wire


def sum_words(kernels: Kernels, words: Tensor) -> int:
    """Return the sum over i of word[i] * (2 i + 1)  mod 2^64. words: contiguous uint8, whole 8-byte words."""
    payload = Payload(bytes=words.data_ptr(), num_words=words.numel() // 8)
    kernels.add_up_payload(byref(payload))
    return int(payload.sum)
