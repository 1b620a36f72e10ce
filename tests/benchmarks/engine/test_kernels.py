"""Cases of short GPU kernels, run in the interpreter or with a reference to check their arguments."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine import kernels
from tests.support.attention_references import reference_absorb_queries


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "launch_absorb_queries", reference_absorb_queries)
    cases = kernels.few_tokens(torch.device("cpu"))
    assert len({name for name, *_ in cases}) == len(cases) == 6
    for _, run, num_bytes, unit in cases:
        run()
        assert num_bytes > 0 and unit == "bytes"
