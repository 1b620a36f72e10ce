"""How many kernels a layer takes in a decode step: a budget, for each costs a few microseconds, whatever it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

_ROOT = Path(__file__).parents[3]
# One more in the first layer, which shares the rows' keys out for all of them. DeepSeek's first layer is dense, the
# others have experts and a shared one; V3's queries are made from short rows, which are normed.
_BUDGETS = {"llama": [11, 10, 10], "qwen3_moe": [11, 10, 10], "deepseek_v2": [11, 10, 10], "deepseek_v3": [13, 12, 12]}


def test_launches_of_a_layer() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.engine.kernels.counted_steps", *_BUDGETS]
    done = subprocess.run(program, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for line, (family, budgets) in zip(done.stdout.splitlines(), _BUDGETS.items(), strict=True):
        counted = json.loads(line)
        assert counted["family"] == family
        for launched, budget in zip(counted["layers"], budgets, strict=True):
            assert len(launched) <= budget, f"{family}: {', '.join(launched)}"
