"""The kernels that both files of tests ask for: bf16, on a CPU."""

from __future__ import annotations

import pytest
import torch

from engine.cpu.library import Kernels, open_kernels


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    opened = open_kernels(dtype=torch.bfloat16, device=torch.device("cpu"))
    if opened is None:
        pytest.skip("no C++ compiler here")
    return opened
