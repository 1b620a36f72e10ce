"""Implausible metrics of a replica do not affect routing."""

from __future__ import annotations

import math

import pytest

from core.rpc import worker_pb2 as pb
from core.wire.messages import make_plausible

_NONSENSE = [math.nan, math.inf, -math.inf, -1.0, 1e300, 5e-324]


def _status() -> pb.Status:
    return pb.Status(
        replica="decode-0",
        running=3,
        prefill_tokens_per_s=100.0,
        decode_step_s=0.02,
        timing=pb.StepTiming(base_s=0.01, token_s=1e-5, pair_s=1e-9),
        totals=pb.Totals(transfer_seconds=1.5, transfers=2),
    )


def test_plausible_values_stay() -> None:
    for status in (_status(), pb.Status()):
        before = pb.Status.FromString(status.SerializeToString())
        assert make_plausible(status)
        assert status == before


@pytest.mark.parametrize("number", _NONSENSE)
@pytest.mark.parametrize("field", ["prefill_tokens_per_s", "decode_step_s", "link_bytes_per_s", "host_bytes_per_s"])
def test_implausible_values_are_cleared(field: str, number: float) -> None:
    status = _status()
    setattr(status, field, number)
    assert not make_plausible(status)
    assert getattr(status, field) == 0.0 and status.running == 3 and status.HasField("timing")


@pytest.mark.parametrize("number", _NONSENSE)
def test_implausible_timing_is_cleared(number: float) -> None:
    status = _status()
    status.timing.pair_s = number
    assert not make_plausible(status)
    assert not status.HasField("timing") and status.decode_step_s == 0.02


def test_implausible_totals_are_cleared() -> None:
    status = _status()
    status.totals.transfer_seconds = math.nan
    assert not make_plausible(status)
    assert status.totals.transfer_seconds == 0.0 and status.totals.transfers == 2
