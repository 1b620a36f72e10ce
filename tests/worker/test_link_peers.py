"""Number of link peers for which a rank reserves device memory."""

from __future__ import annotations

from typing import Any

import pytest

from core.spec.loader import parse_spec
from worker.rank_setup import num_link_peers

_WIDE = {"prefill": {"tensor_parallel": 2}, "decode": {"tensor_parallel": 3, "replicas": 2}}


@pytest.mark.parametrize(
    ("spec", "tensor_parallel", "peers"),
    [
        ({}, 1, 1),
        ({"decode": {"replicas": 4}}, 1, 4),
        ({"prefill": {"replicas": 0}, "decode": {"replicas": 0}}, 1, 0),  # all replicas are added later
        (_WIDE, 2, 4),  # the heads of three ranks go to two: each links to two of them
        (_WIDE, 3, 2),
        ({"autoscale": {"prefill": {"max": 3}, "decode": {"max": 5}}}, 1, 7),
        ({"autoscale": {"prefill": {"max": 2}, "decode": {"max": 2}}, "decode": {"replicas": 2}}, 1, 3),
    ],
)
def test_number_of_link_peers(spec: dict[str, Any], tensor_parallel: int, peers: int) -> None:
    assert num_link_peers(parse_spec(spec), tensor_parallel) == peers
