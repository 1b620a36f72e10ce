"""Rates assumed for a replica that has not measured its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.routing.replica_load import ReplicaLoad, UsualRates
from tests.support.members import make_member

_IDLE = ReplicaLoad(
    member=make_member(),
    available_blocks=100,
    promised_blocks=0,
    promised_streams=0,
    num_streams=0,
    num_reported_streams=0,
    num_waiting=0,
    queued_tokens=0,
    prefill_tokens_per_s=0.0,
    decode_step_s=0.0,
    link_bytes_per_s=0.0,
    host_bytes_per_s=0.0,
    disk_bytes_per_s=0.0,
    timing=None,
)


def test_a_measured_draft_rate_of_zero_counts_in_the_mean() -> None:
    drafting = replace(_IDLE, tokens_per_row=3.0, drafted_per_row=4.0)
    without = replace(_IDLE, tokens_per_row=1.0, drafted_per_row=0.0)
    usual = UsualRates.of([drafting, without, _IDLE])
    assert (usual.tokens_per_row, usual.drafted_per_row) == (pytest.approx(2.0), pytest.approx(2.0))
    unknown = UsualRates.of([_IDLE])
    assert (unknown.tokens_per_row, unknown.drafted_per_row) == (1.0, 0.0)
