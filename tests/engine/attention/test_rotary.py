"""Rotary angle tables on a CPU: values do not change as the tables grow."""

from __future__ import annotations

import torch

from core.model.config import load
from engine.attention.rotary import Rotary
from tests.engine.tiny_models import MakeModel

CPU = torch.device("cpu")


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
