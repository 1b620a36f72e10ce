"""Counter of the bytes that a kernel loads from given tensors, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor


@dataclass
class Counted:
    num_bytes: int = 0


@contextmanager
def count_reads(*tensors: Tensor) -> Iterator[Counted]:
    """Count loads; bytes read repeatedly, by one or several programs, count each time."""
    from triton.runtime.interpreter import InterpreterBuilder

    spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    counted, load = Counted(), InterpreterBuilder.create_masked_load

    def counting(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = np.asarray(pointers.data)[np.broadcast_to(np.asarray(mask.data), np.shape(pointers.data))]
        for first, end in spans:
            counted.num_bytes += size * int(((addresses >= first) & (addresses < end)).sum())
        return load(self, pointers, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counting)
        yield counted
