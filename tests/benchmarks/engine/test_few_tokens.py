"""Cases of short GPU kernels, run with the reference implementations to check their arguments."""

from __future__ import annotations

import torch

from benchmarks.engine.few_tokens import few_tokens


def test_every_case_runs() -> None:
    cases = few_tokens(torch.device("cpu"))
    assert len({name for name, *_ in cases}) == len(cases) == 6
    for _, run, num_bytes, unit in cases:
        run()
        assert num_bytes > 0 and unit == "bytes"
