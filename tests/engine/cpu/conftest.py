"""Fixture of the CPU kernels for bf16.

With EMULATED_ARM=armv8-a, or another of `ARCHITECTURES`, all tests use kernels for that processor in an emulator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from engine.cpu import library
from engine.cpu.library import Kernels, open_kernels
from tests.engine.cpu.emulated_kernels import EmulatedKernels, can_emulate


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedKernels | None]:
    architecture = os.environ.get("EMULATED_ARM")
    if architecture is None:
        yield None
        return
    if not can_emulate():
        pytest.skip("no compiler for ARM here, or no qemu-aarch64")
    kernels = EmulatedKernels(architecture, tmp_path_factory.mktemp("arm"))
    yield kernels
    kernels.close()


@pytest.fixture(scope="module")
def kernels(emulated: EmulatedKernels | None) -> Iterator[Kernels]:
    with pytest.MonkeyPatch.context() as patch:
        if emulated is not None:
            patch.setattr(library, "load_kernels", lambda: emulated)
        opened = open_kernels(dtype=torch.bfloat16, device=torch.device("cpu"))
        if opened is None:
            pytest.skip("no C++ compiler here")
        yield opened
