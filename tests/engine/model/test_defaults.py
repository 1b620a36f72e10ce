"""A config.json may leave out any setting whose value is transformers' default."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.model import config as model_config
from core.types.errors import SpecError
from tests.engine.tiny_models import CONFIGS

# Tables that lack some of the defaults.
INCOMPLETE = {
    *("mistral", "mixtral", "ministral3", "mistral4", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
    *("glm4_moe", "glm4_moe_lite", "minimax_m2", "llama4"),
}
# generation_config.json gives them.
TOKENS = {"bos_token_id", "eos_token_id"}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in INCOMPLETE])
def test_missing_setting_is_an_error_or_the_default_of_transformers(name: str) -> None:
    full = {key: value for key, value in CONFIGS[name]().to_dict().items() if value is not None}
    expected = model_config.parse(full, Path(name))
    for key in full.keys() - TOKENS - {"model_type"}:
        try:
            found = model_config.parse({other: full[other] for other in full if other != key}, Path(name))
        except SpecError as error:
            assert "is missing" in str(error), key
        else:
            assert found == expected, key
