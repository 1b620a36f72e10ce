"""A config.json may leave out any setting whose value is transformers' default."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.model import config as model_config
from core.types.errors import SpecError
from tests.engine.tiny_models import CONFIGS

# Settings without which the defaults of these families are no whole model.
NEEDED: dict[str, dict[str, int]] = {"deepseek_v2": {"num_experts_per_tok": 2}, "glm4_moe": {"head_dim": 128}}
# Sizes of matrices, without which no checkpoint is written.
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"}
SIZES |= {"num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"}
SIZES |= {"num_local_experts"}
# generation_config.json gives the tokens. transformers does not load the layers that predict further ones.
UNUSED = {"bos_token_id", "eos_token_id", "model_type", "num_nextn_predict_layers"}


# Their defaults are no model with attention, or have no list of layers.
WITHOUT_DEFAULTS = {"granite_hybrid", "nemotron_h"}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in WITHOUT_DEFAULTS])
def test_missing_setting_is_the_default_of_transformers(name: str) -> None:
    needed = NEEDED.get(name, {})
    full = {key: value for key, value in CONFIGS[name](**needed).to_dict().items() if value is not None}
    expected = model_config.parse(full, Path(name))
    for key in full.keys() - UNUSED - needed.keys():
        try:
            found = model_config.parse({other: full[other] for other in full if other != key}, Path(name))
        except SpecError as error:
            assert key in SIZES and "is missing" in str(error), key
        else:
            assert found == expected, key
