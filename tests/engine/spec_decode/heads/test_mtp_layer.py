"""Error for a model without an MTP layer."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from core.model.draft_heads import HeadsPlace
from core.types.errors import SpecError
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.tiny_models import MakeModel, MakeRunner


def test_model_without_mtp_layer_is_rejected(tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path) -> None:
    write_mtp(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.3.enorm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    for directory, complaint in (
        (tiny_model("llama")[0], "LlamaForCausalLM has none"),
        (tmp_path, "missing: model.layers.3.enorm.weight"),
    ):
        with pytest.raises(SpecError) as rejected:
            make_runner(directory, heads=HeadsPlace("mtp", directory))
        assert complaint in str(rejected.value) and "\n" not in str(rejected.value)
