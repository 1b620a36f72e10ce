"""Kernels in the place of their references, so that a model's step runs in Triton's interpreter as it does on a GPU."""

from __future__ import annotations

import pytest
from torch import Tensor

from engine.attention import latent_heads as torch_latent_heads
from engine.attention import triton_heads as heads
from engine.attention import triton_latent_heads as latent_heads
from engine.kernels.decode_attention import launch_decode_attention
from engine.kernels.dense_prefill import launch_dense_prefill_attention
from engine.kernels.gather_rows import launch_gather_rows
from engine.kernels.kv_write import launch_write_kv
from engine.kernels.latent_attention import launch_latent_decode_attention
from engine.kernels.latent_write import launch_write_latents
from engine.kernels.prefill_attention import launch_prefill_attention
from engine.kernels.rms_norm import launch_rms_norm
from engine.kernels.rotary import launch_rotate
from engine.kernels.silu_mul import launch_silu_mul
from engine.kernels.splits import Splits, share_out
from engine.layers import layers


def launch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """KernelHeads, KernelLatentHeads and the layers of a dense model launch kernels from now on, on any device."""
    for module, name, launch in (
        (heads, "decode_attention", launch_decode_attention),
        (heads, "prefill_attention", launch_prefill_attention),
        (heads, "rotate", launch_rotate),
        (heads, "write_kv", launch_write_kv),
        (latent_heads, "latent_decode_attention", launch_latent_decode_attention),
        (latent_heads, "dense_prefill_attention", launch_dense_prefill_attention),
        (heads, "dense_prefill_attention", launch_dense_prefill_attention),
        (heads, "gather_rows", launch_gather_rows),
        (latent_heads, "write_latents", launch_write_latents),
        (torch_latent_heads, "rotate", launch_rotate),
        (layers, "rms_norm", launch_rms_norm),
        (layers, "silu_mul", launch_silu_mul),
    ):
        monkeypatch.setattr(module, name, launch)

    def of(contexts_R: Tensor, *, window: int | None, **more: int) -> Splits:
        return share_out(contexts_R, window=window, num_programs=3)

    monkeypatch.setattr(Splits, "of", of)
