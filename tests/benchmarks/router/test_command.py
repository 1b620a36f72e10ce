"""What `python -m benchmarks router` makes of its figures."""

from __future__ import annotations

import pytest

from benchmarks.router.command import lines

_ROW = {
    "door": "http",
    "streams": 200,
    "processor_share": 0.06,
    "tokens_per_core_s": 48353,
    "memory_kib_per_stream": 57.0,
    "beyond_pace_ms": {"p50": 0.1, "p99": 3.0, "max": 9.0},
    "worker_late_ms": 2.0,
}


@pytest.mark.parametrize(("num_come", "is_told"), [(9990, False), (9001, False), (8999, True), (627, True)])
def test_it_says_that_tokens_did_not_come(num_come: int, is_told: bool) -> None:
    result = {"costs": {}, "prompts": [], "streams": [_ROW | {"tokens_per_s": num_come}]}
    told = [line for line in lines(result, rate=10_000.0) if f"only {num_come} of 10000 tokens/s came" in line]
    assert len(told) == is_told
