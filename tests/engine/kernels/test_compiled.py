"""Whole steps of large models on a GPU that is not there: compiled for it, they fit its registers and its memory.

What the interpreter does not see: launches that a GPU would refuse, tensors of the host among those of the device, and
places where the host would wait for the device inside a step. The latter fail inside the program that is run here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

_ROOT = Path(__file__).parents[3]
_SHARED_KIB = {"9.0": 227, "8.0": 163}  # of one program: the CUDA programming guide's table of compute capabilities
_STACK_BYTES = {"9.0": 0, "8.0": 64}  # tiles are made for the first; a few registers do not matter
_PRODUCTS = {"9.0": "wgmma.mma_async", "8.0": "mma.sync"}
# Of prompts: tiles that are large enough for the widest instruction. Rows of a few heads or tokens are not.
_WIDE = {"_attend_tile"}


def launches(capability: str, *cases: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.engine.kernels.compiled_steps", capability, *cases]
    done = subprocess.run(program, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [of["case"] for of in found] == list(cases)
    return [launch | {"case": of["case"]} for of in found for launch in of["launches"]]


def check(capability: str, *cases: str) -> None:
    for launch in launches(capability, *cases):
        place = f"{launch['case']}: {launch['name']}{launch['grid']}"
        assert launch["stack_bytes"] <= _STACK_BYTES[capability], (
            f"{place} has {launch['stack_bytes']} bytes of each thread in memory"
        )
        assert launch["shared_bytes"] <= _SHARED_KIB[capability] << 10, place
        if launch["name"] in _WIDE:
            assert _PRODUCTS[capability] in launch["ptx"], f"{place} multiplies without {_PRODUCTS[capability]}"


@pytest.mark.timeout(300)
def test_steps_fit_a_gpu() -> None:
    check("9.0", "qwen3_moe/int8")


@pytest.mark.slow
@pytest.mark.parametrize("capability", _SHARED_KIB)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v2"])
def test_every_pool_on_every_gpu(family: str, capability: str) -> None:
    check(capability, *(f"{family}/{pool_dtype}" for pool_dtype in ("auto", "fp8_e4m3", "int8")))
