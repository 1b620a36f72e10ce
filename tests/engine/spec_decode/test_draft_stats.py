"""Reported yields of rows pass the routers' plausibility check."""

from __future__ import annotations

from core.rpc import worker_pb2 as pb
from core.wire.messages import make_plausible
from engine.spec_decode.acceptance import RowYield


def test_yield_of_old_drafts_fades_to_zero() -> None:
    found = RowYield()
    assert (found.tokens_per_row, found.drafted_per_row) == (0.0, 0.0)
    found.add(1, num_tokens=3, num_drafted=4)
    assert (found.tokens_per_row, found.drafted_per_row) == (3.0, 4.0)
    for _ in range(2000):
        found.add(16, num_tokens=16, num_drafted=0)
        assert make_plausible(pb.Status(tokens_per_row=found.tokens_per_row, drafted_per_row=found.drafted_per_row))
    assert found.drafted_per_row == 0.0 and abs(found.tokens_per_row - 1.0) < 1e-6
