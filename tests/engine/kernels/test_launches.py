"""Launch budget of a layer in a decode step; each launch costs a few microseconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

_ROOT = Path(__file__).parents[3]
# The first layer has one more, which splits the rows' keys for all layers. DeepSeek's first layer is dense, the others
# have experts and a shared one; V3's queries are low-rank and normed.
_BUDGETS = {"llama": [11, 10, 10], "qwen3_moe": [11, 10, 10], "deepseek_v2": [11, 10, 10], "deepseek_v3": [13, 12, 12]}


def test_layers_stay_within_the_launch_budget() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.engine.kernels.counted_steps", *_BUDGETS]
    done = subprocess.run(program, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for line, (family, budgets) in zip(done.stdout.splitlines(), _BUDGETS.items(), strict=True):
        counted = json.loads(line)
        assert counted["family"] == family
        for launched, budget in zip(counted["layers"], budgets, strict=True):
            assert len(launched) <= budget, f"{family}: {', '.join(launched)}"
