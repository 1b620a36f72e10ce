"""Text output of `python -m benchmarks router`."""

from __future__ import annotations

import pytest

from benchmarks.router.command import lines

_ROW = {
    "endpoint": "http",
    "streams": 200,
    "processor_share": 0.06,
    "tokens_per_core_s": 48353,
    "memory_kib_per_stream": 57.0,
    "beyond_pace_ms": {"p50": 0.1, "p99": 3.0, "max": 9.0},
    "worker_late_ms": 2.0,
}


@pytest.mark.parametrize(("num_arrived", "is_reported"), [(9990, False), (9001, False), (8999, True), (627, True)])
def test_low_token_rate_is_reported(num_arrived: int, is_reported: bool) -> None:
    result = {"costs": {}, "prompts": [], "streams": [_ROW | {"tokens_per_s": num_arrived}]}
    warnings = [
        line for line in lines(result, rate=10_000.0) if f"only {num_arrived} of 10000 tokens/s arrived" in line
    ]
    assert len(warnings) == is_reported
