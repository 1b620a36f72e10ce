"""Launch budget of a layer in a recorded decode step; each launch costs a few microseconds.

The program that counts them fails if a step cannot be captured in a CUDA graph: if it copies from or to the host, or
depends on values on the device.
"""

from __future__ import annotations

import pytest

from tests.engine.kernels.test_compiled import results
from tests.engine.model.test_models import FAMILIES

pytest.importorskip("triton")

# Before the first layer's KV write, between the writes, and after the last one. The first layer also splits the rows'
# keys for all layers. DeepSeek's first layer is dense, the others have experts and a shared one; V3's queries are
# low-rank and normed.
_BUDGETS = {
    "large/llama": [9, 11, 10, 10, 10],
    "large/qwen3_moe": [9, 11, 10, 10, 11],
    "large/deepseek_v2": [9, 11, 10, 10, 11],
    "large/deepseek_v3": [11, 13, 12, 12, 11],
}
# Of tiny models, by family; the largest of these counts. Each rotation takes six; layers without KV of their own, such
# as recurrent ones, count for the last that has some; so does what the first layer prepares for all.
_USUAL = 13
_MORE = {
    14: ("granite_moe",),
    15: ("gemma2", "gemma3", "gemma3, soft caps", "gemma4, equal heads, unused experts", "minimax_m2"),
    16: ("ministral3",),
    17: ("llama4", "llama4, no norms, fixed temperature", "olmo2"),
    18: ("qwen2_moe", "qwen2_moe, gelu", "mistral4"),
    21: ("llama, dynamic rope", "lfm2", "lfm2, biases"),
    24: ("nemotron_h, experts",),
    25: ("gemma4, experts", "nemotron_h", "nemotron_h, biases", "granite_hybrid, dense, rope"),
    28: (
        "deepseek_v32",
        "deepseek_v32, yarn, wide choice",
        "glm_moe_dsa",
        "glm_moe_dsa, all layers choose",
        "glm_moe_dsa, every third layer chooses",
        "nemotron_h, latents",
    ),
    33: ("qwen3_5",),
    37: ("granite_hybrid",),
    45: ("qwen3_5_moe", "qwen3_next"),
    65: ("gemma4",),
}
_MOST = {family: most for most, families in _MORE.items() for family in families}
_QUICK = ("large/llama", "large/deepseek_v3", "llama", "gemma4", "gpt_oss", "llama4", "minimax_m2")
_QUICK += ("qwen3_next", "lfm2", "glm_moe_dsa")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("families", [_QUICK, pytest.param((*_BUDGETS, *FAMILIES), marks=pytest.mark.slow)], ids=len)
def test_recorded_steps_stay_within_the_launch_budget(families: tuple[str, ...]) -> None:
    counted = {of["case"]: of["layers"] for of in results("9.0", *families, program="counted_steps")}
    for family, layers in counted.items():
        budgets = _BUDGETS.get(family) or [_MOST.get(family, _USUAL)] * len(layers)
        for launched, budget in zip(layers, budgets, strict=True):
            assert len(launched) <= budget, f"{family}: {', '.join(launched)}"
