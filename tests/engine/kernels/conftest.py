"""Uninitialized memory in the tests of kernels holds infinities, so that a kernel that reads it fails always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make_filled(*shape: Any, **options: Any) -> torch.Tensor:
            tensor = make(*shape, **options)
            return tensor.fill_(float("inf")) if tensor.dtype in _FLOATS else tensor

        return make_filled

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
