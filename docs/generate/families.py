"""Table of model families, and the example of one."""

from __future__ import annotations

from pathlib import Path

from core.model.families import FAMILIES
from docs.generate.table import table

_ROOT = Path(__file__).parent.parent.parent

# By the first architecture of a family: its models, the usual format of tool calls, and of thoughts.
_MODELS = {
    "LlamaForCausalLM": ("Llama 2 and 3, SmolLM2", "llama3_json", ""),
    "MistralForCausalLM": ("Mistral 7B, Nemo, Small 3", "mistral", "[THINK]"),
    "Ministral3ForCausalLM": ("Ministral 3", "mistral", "[THINK]"),
    "Qwen2ForCausalLM": ("Qwen2, Qwen2.5", "hermes", ""),
    "Qwen3ForCausalLM": ("Qwen3, text of Qwen3-VL", "hermes", "<think>"),
    "MixtralForCausalLM": ("Mixtral", "mistral", ""),
    "Qwen2MoeForCausalLM": ("Qwen1.5-MoE, Qwen2-MoE", "hermes", ""),
    "Qwen3NextForCausalLM": ("Qwen3-Next", "hermes", "<think>"),
    "Qwen3_5ForCausalLM": ("text of Qwen3.5", "qwen3_coder", "<think>"),
    "Qwen3_5MoeForCausalLM": ("text of Qwen3.5-MoE", "qwen3_coder", "<think>"),
    "Lfm2ForCausalLM": ("LFM2", "", ""),
    "Qwen3MoeForCausalLM": ("Qwen3-MoE, Qwen3-Coder", "hermes, qwen3_coder", "<think>"),
    "DeepseekV2ForCausalLM": ("DeepSeek-V2", "", ""),
    "DeepseekV3ForCausalLM": (
        "DeepSeek-V3, R1, V3.1, Kimi-K2, text of K2.5",
        "deepseek_v3, deepseek_v31, kimi_k2",
        "<think>",
    ),
    "Glm4MoeLiteForCausalLM": ("GLM-4.7-Flash", "glm47", "<think>"),
    "DeepseekV32ForCausalLM": ("DeepSeek-V3.2", "deepseek_v32", "<think>"),
    "GlmMoeDsaForCausalLM": ("GLM-5", "glm47", "<think>"),
    "Mistral4ForCausalLM": ("Mistral Small 4, Large 3", "mistral", "[THINK]"),
    "Gemma2ForCausalLM": ("Gemma 2", "generic", ""),
    "Gemma3ForCausalLM": ("Gemma 3, also its text part", "generic", ""),
    "Gemma4ForCausalLM": ("Gemma 4, also its text part", "gemma4", "channels"),
    "Phi3ForCausalLM": ("Phi-3, Phi-4-mini", "generic", ""),
    "GptOssForCausalLM": ("gpt-oss", "openai", "channels"),
    "GraniteForCausalLM": ("Granite 3", "generic", ""),
    "GraniteMoeForCausalLM": ("Granite 3 MoE", "generic", ""),
    "GraniteMoeHybridForCausalLM": ("Granite 4", "hermes", ""),
    "Glm4MoeForCausalLM": ("GLM-4.5, 4.6, 4.7", "glm45, glm47", "<think>"),
    "MiniMaxM2ForCausalLM": ("MiniMax-M2", "minimax_m2", "<think>"),
    "NemotronHForCausalLM": ("Nemotron-H, Nemotron 3", "qwen3_coder", "<think>"),
    "Llama4ForCausalLM": ("Llama 4, also its text part", "llama4_pythonic", ""),
    "Olmo2ForCausalLM": ("OLMo-2", "generic", ""),
    "SmolLM3ForCausalLM": ("SmolLM3", "hermes", "<think>"),
}


def families() -> str:
    """Return the table of families. Raises KeyError for a family that `_MODELS` lacks."""
    rows = []
    for family in FAMILIES:
        name = family.architecture
        if name not in _MODELS:
            raise KeyError(f"add {name} to _MODELS in {Path(__file__).relative_to(_ROOT)}")
        models, tools, thoughts = _MODELS[name]
        rows.append((f"`{name}`", models, tools or "generic", f"`{thoughts}`" if thoughts else ""))
    return table(("architecture", "models", "tool calls", "thoughts"), rows)


def example() -> str:
    """Return the code of a family that needs no more than a table."""
    return f"```python\n{(_ROOT / 'core/model/families/granite.py').read_text().strip()}\n```"
