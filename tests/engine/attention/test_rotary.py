"""Rotary angle tables on a CPU: values do not change as the tables grow."""

from __future__ import annotations

import math

import torch

from core.model.config import load
from engine.attention.rotary import Rotary
from tests.engine.tiny_models import MakeModel

CPU = torch.device("cpu")


def test_angles_match_transformers(tiny_model: MakeModel) -> None:
    directory, _ = tiny_model("llama")
    rope = load(directory).ropes[0]
    rotary = Rotary(rope, CPU)
    for positions in ([3, 0, 3], [5000, 1023, 1024], [12], []):
        cos_T1F, sin_T1F = rotary(torch.tensor(positions, dtype=torch.int64), torch.float32)
        dim = rope.dim
        for position, cos_F, sin_F in zip(positions, cos_T1F.squeeze(1), sin_T1F.squeeze(1), strict=True):
            angles = [position / rope.theta ** (2 * i / dim) for i in range(dim // 2)]
            torch.testing.assert_close(cos_F, torch.tensor([math.cos(a) for a in angles]), atol=1e-3, rtol=0)
            torch.testing.assert_close(sin_F, torch.tensor([math.sin(a) for a in angles]), atol=1e-3, rtol=0)


def test_values_do_not_depend_on_earlier_lookups(tiny_model: MakeModel) -> None:
    """Bit-identical in each dtype, so that two replicas store the same keys."""
    directory, _ = tiny_model("llama")
    rope = load(directory).ropes[0]
    positions_T = torch.tensor([0, 700, 1024, 2999])
    for dtype in (torch.float32, torch.bfloat16):
        straight, bit_by_bit = Rotary(rope, CPU), Rotary(rope, CPU)
        for position in (0, 1100, 2100):
            bit_by_bit(torch.tensor([position]), dtype)
        for got, wanted in zip(bit_by_bit(positions_T, dtype), straight(positions_T, dtype), strict=True):
            torch.testing.assert_close(got, wanted, atol=0, rtol=0)
