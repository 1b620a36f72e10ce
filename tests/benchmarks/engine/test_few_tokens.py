"""What is measured of short kernels on a GPU, done by their references: nothing is given what it does not take."""

from __future__ import annotations

import torch

from benchmarks.engine.few_tokens import few_tokens


def test_every_case_can_be_run() -> None:
    cases = few_tokens(torch.device("cpu"))
    assert len({name for name, *_ in cases}) == len(cases) == 6
    for _, run, num_bytes, unit in cases:
        run()
        assert num_bytes > 0 and unit == "bytes"
