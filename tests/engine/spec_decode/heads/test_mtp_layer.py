"""Logits of MTP layers with parts that others do not have; error for a model without an MTP layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.model import config as model_config
from core.model.draft_heads import HeadsPlace, load_heads
from core.types.errors import SpecError
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.spec_decode.heads.head_row import HeadRow
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.spec_decode.proposers import draft_logits
from tests.engine.steps import prompts
from tests.engine.tiny_models import GLM_MOE_DSA, MakeModel, MakeRunner, tiny_config


@pytest.mark.parametrize("family", ["deepseek_v32", "nemotron_h"])
def test_logits_behind_a_prompt_equal_the_reference(family: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    """With an indexer, which chooses 7 of the positions, draft included; with experts in a layer of their own."""
    mtp, (tokens,) = write_mtp(tmp_path, family=family), prompts(23)
    runner, expected = make_runner(tmp_path, heads=HeadsPlace("mtp", tmp_path)), list[Tensor]()
    prompt = Row(tokens[:-1], start=0, blocks=[3, 1, 2], num_logits=1, state_index=0)
    runner.forward(Batch.of([prompt], block_size=8))

    def choose_same(logits_V: Tensor, place: int) -> int:
        expected.append(logits_V)
        return 11 + place

    mtp.reference(tokens, 3, choose=choose_same)
    found = draft_logits(runner, [HeadRow(tokens[-1], 22, [3, 1, 2])], 3)
    torch.testing.assert_close(torch.cat(found), torch.stack(expected), atol=2e-3, rtol=1e-3)


def test_mtp_layer_chooses_positions_if_the_layer_before_shares_them(tmp_path: Path) -> None:
    tiny_config("glm_moe_dsa", **GLM_MOE_DSA, num_nextn_predict_layers=1).save_pretrained(tmp_path)
    model = model_config.load(tmp_path)
    shape = load_heads("mtp", tmp_path, model).shape
    assert not model.layers[-1].has_indexer and shape is not None and shape.layers[-1].has_indexer
    assert shape.kv_layers[-1][1] == model.kv_dim + GLM_MOE_DSA["index_head_dim"]


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
