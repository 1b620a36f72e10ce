"""Kernels in the place of their references, so that a model's step runs in Triton's interpreter as it does on a GPU."""

from __future__ import annotations

import pytest

from engine import layers
from engine.kernels import heads
from engine.kernels.decode_attention import launch_decode_attention
from engine.kernels.kv_write import launch_write_kv
from engine.kernels.prefill_attention import launch_prefill_attention
from engine.kernels.rms_norm import launch_rms_norm
from engine.kernels.rotary import launch_rotate
from engine.kernels.silu_mul import launch_silu_mul


def launch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """KernelHeads and the layers of a dense model launch kernels from now on, on any device."""
    for name, launch in (
        ("decode_attention", launch_decode_attention),
        ("prefill_attention", launch_prefill_attention),
        ("rotate", launch_rotate),
        ("write_kv", launch_write_kv),
    ):
        monkeypatch.setattr(heads, name, launch)
    monkeypatch.setattr(layers, "rms_norm", launch_rms_norm)
    monkeypatch.setattr(layers, "silu_mul", launch_silu_mul)
