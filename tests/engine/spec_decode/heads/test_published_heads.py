"""EAGLE-3 heads written by `speculators` and SpecForge: logits equal those libraries'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from core.model.draft_heads import HeadsPlace
from core.types.errors import SpecError
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.runner.runner import ModelRunner
from engine.spec_decode.heads.head_row import HeadRow
from tests.engine.spec_decode.heads.published_files import LAYERS, NUM_PLACES, RECORDED, WRITERS
from tests.engine.spec_decode.proposers import draft_logits
from tests.engine.steps import needs_compiler
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

_PUBLISHED = Path(__file__).parent / "published"
_BLOCKS = [3, 5, 7]


@pytest.mark.parametrize("library", WRITERS)
def test_published_head_drafts_like_its_library(library: str, tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    runner = make_runner(tiny_model("llama")[0], heads=HeadsPlace("eagle", _PUBLISHED / library))
    assert runner.heads and runner.heads.layers == LAYERS
    for position in (1, 5, 9, 17):
        ours, theirs = _logits(runner, _PUBLISHED / library, position)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize("library", WRITERS)
def test_cpu_kernels_draft_like_the_library(library: str, tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    place = HeadsPlace("eagle", _PUBLISHED / library)
    runner = make_runner(tiny_model("llama")[0], dtype="bfloat16", heads=place)
    for position in (5, 17):
        ours, theirs = _logits(runner, _PUBLISHED / library, position)
        first = (ours - theirs)[0].abs().mean()  # int8 weights; errors accumulate at later places
        assert first < 0.1 * theirs[0].abs().mean()


@pytest.mark.parametrize(
    ("library", "changes", "complaint"),
    [
        ("speculators", {"speculators_model_type": "dflash"}, "dflash is not supported; supported: eagle3"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, r"layers \(1, 2, 4\); .* from 0 to 3"),
        ("speculators", {"target_hidden_size": 64}, "target_hidden_size is 64, and the model's is 48"),
        ("speculators", {"transformer_layer_config": None}, "config.json"),
        ("layer", {"num_hidden_layers": 2}, "heads of 2 layers"),
        ("layer", {"vocab_size": 99}, "vocab_size is 99"),
        ("layer", {"layer_types": ["sliding_attention"]}, "sliding-window attention"),
        ("layer", {"hidden_act": "relu2"}, "hidden_act relu2 is not supported"),
        ("speculators", {"transformer_layer_config": {}}, "model_type qwen3 is not supported; supported: llama"),
        ("specforge", {"norm_output": False}, "norm_output: false is not supported"),
        ("specforge", {"hidden_size": 64}, "hidden_size is 64, and the model's is 48"),
        ("specforge", {"vocab_size": 99}, "vocab_size is 99, and the model's is 131"),
        ("specforge", {"num_hidden_layers": 2}, "heads of 2 layers are not supported; supported: 1"),
        ("specforge", {"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel is not EAGLE-3"),
    ],
)
def test_unsupported_published_head_is_rejected(
    library: str,
    changes: dict[str, Any],
    complaint: str,
    tiny_model: MakeModel,
    make_runner: MakeRunner,
    tmp_path: Path,
) -> None:
    """layer: the changes are of the layer's own config."""
    name = "speculators" if library == "layer" else library
    shutil.copytree(_PUBLISHED / name, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (config["transformer_layer_config"] if library == "layer" else config).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=complaint) as rejected:
        make_runner(tiny_model("llama")[0], heads=HeadsPlace("eagle", tmp_path))
    assert "\n" not in str(rejected.value)


def _logits(runner: ModelRunner, directory: Path, position: int) -> tuple[Tensor, Tensor]:
    """Return the logits of three places after a position, (P, D): the engine's, and those that the library recorded.

    The library reads the tokens of the text instead of the head's own, and so does the engine here.
    """
    recorded = load_file(directory / RECORDED)
    token_ids = recorded["token_ids"].tolist()
    batch = Batch.of([Row(token_ids[:position], 0, _BLOCKS, num_logits=1)], block_size=runner.layout.block_size)
    assert runner.heads
    aux_hidden_states = AuxHiddenStates(runner.heads.layers)
    aux_hidden_states.token_ids_T = torch.tensor(token_ids[:position], dtype=torch.int32)
    # the hidden state of a token is stored with the next token
    hidden_T3E = recorded["hidden"][1 : position + 1].to(runner.dtype)
    for layer, hidden_TE in zip(runner.heads.layers, hidden_T3E.chunk(3, dim=-1), strict=True):
        aux_hidden_states.note(layer, hidden_TE.contiguous())
    with torch.inference_mode():
        runner.heads.follow(batch, aux_hidden_states, None)
        row = HeadRow(token_ids[position], position, _BLOCKS)
        drafted = draft_logits(
            runner, [row], NUM_PLACES, lambda place: token_ids[(position + 1 + place) % len(token_ids)]
        )
    return torch.cat(drafted), recorded["logits_PTD"][:, position]
