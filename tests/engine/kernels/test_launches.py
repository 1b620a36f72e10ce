"""Launch budget of a layer in a recorded decode step; each launch costs a few microseconds.

The program that counts them fails if a step cannot be captured in a CUDA graph: if it copies from or to the host, or
depends on values on the device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.model.test_models import FAMILIES

pytest.importorskip("triton")

_ROOT = Path(__file__).parents[3]
# Before the first layer's KV write, between the writes, and after the last one. The first layer also splits the rows'
# keys for all layers. DeepSeek's first layer is dense, the others have experts and a shared one; V3's queries are
# low-rank and normed.
_BUDGETS = {
    "large/llama": [9, 11, 10, 10, 10],
    "large/qwen3_moe": [9, 11, 10, 10, 11],
    "large/deepseek_v2": [9, 11, 10, 10, 11],
    "large/deepseek_v3": [11, 13, 12, 12, 11],
}
# Of tiny models, by family; the largest of these counts. Each rotation takes six; layers without KV of their own count
# for the last that has some.
_USUAL = 13
_MOST = {
    "llama, dynamic rope": 21,
    # The shared expert has an odd width, so that it cannot join the others.
    "qwen2_moe": 18,
    "qwen2_moe, gelu": 18,
    "gemma2": 15,
    "gemma3": 15,
    "gemma3, soft caps": 15,
    "gemma4": 65,
    "gemma4, experts": 25,
    "gemma4, equal heads, unused experts": 15,
    "minimax_m2": 15,
    "ministral3": 16,
    "mistral4": 18,
    "llama4": 17,
    "llama4, no norms, fixed temperature": 17,
    "granite_moe": 14,
    "olmo2": 17,
    # Index keys and queries, and the choice of positions. The first layer prepares it for all layers.
    "deepseek_v32": 28,
    "deepseek_v32, yarn, wide choice": 28,
    "glm_moe_dsa": 28,
    "glm_moe_dsa, all layers choose": 28,
    "glm_moe_dsa, every third layer chooses": 28,
    # With recurrent layers, which have no KV to write: for several layers.
    "lfm2": 21,
    "lfm2, biases": 21,
    "nemotron_h": 25,
    "nemotron_h, biases": 25,
    "nemotron_h, experts": 24,
    "nemotron_h, latents": 28,
    "granite_hybrid": 37,
    "granite_hybrid, dense, rope": 25,
    "qwen3_5": 33,
    "qwen3_5_moe": 45,
    "qwen3_next": 45,
}
_QUICK = ("large/llama", "large/deepseek_v3", "llama", "gemma4", "gpt_oss", "llama4", "minimax_m2")
_QUICK += ("qwen3_next", "lfm2", "glm_moe_dsa")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("families", [_QUICK, pytest.param((*_BUDGETS, *FAMILIES), marks=pytest.mark.slow)], ids=len)
def test_recorded_steps_stay_within_the_launch_budget(families: tuple[str, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-m", "tests.engine.kernels.counted_steps", *families]
    done = subprocess.run(program, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counted = {of["family"]: of["layers"] for of in map(json.loads, done.stdout.splitlines())}
    assert list(counted) == list(families)
    for family, layers in counted.items():
        budgets = _BUDGETS.get(family) or [_MOST.get(family, _USUAL)] * len(layers)
        for launched, budget in zip(layers, budgets, strict=True):
            assert len(launched) <= budget, f"{family}: {', '.join(launched)}"
