"""Drafts and features of a row do not depend on the rows beside it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from core.model.draft_heads import HeadsPlace
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.layers.packed_matrix import PackedMatrix
from engine.runner.runner import ModelRunner
from engine.spec_decode.heads.head_row import HeadRow
from tests.engine.spec_decode.heads.head_files import write_eagle
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.spec_decode.proposers import draft_logits
from tests.engine.steps import needs_compiler, prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

_SIZE = 8
_NUM_TOKENS = 3


def _compute(runner: ModelRunner, *rows: Row) -> None:
    runner.forward(Batch.of(rows, block_size=_SIZE))


@needs_compiler
@pytest.mark.parametrize("num_rows", [4, 70], ids=["few", "more than a program takes"])
def test_rows_draft_together_as_alone(
    num_rows: int, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """With CPU kernels, tables of different widths, and places in a row's next block."""
    directory, _ = tiny_model("llama")
    write_eagle(tmp_path)
    heads = HeadsPlace("eagle", tmp_path)
    runner = make_runner(directory, dtype="bfloat16", num_blocks=6 * num_rows, max_running=num_rows, heads=heads)
    lens = [(5, 8, 30, 15, 23)[i % 5] for i in range(num_rows)]
    rows: list[HeadRow] = []
    for i, tokens in enumerate(prompts(*lens)):
        table = [*range(6 * i, 6 * i + len(tokens) // _SIZE + 1)]
        _compute(runner, Row(tokens, 0, table, num_logits=1))
        rows.append(HeadRow(7 + i % 9, len(tokens), table))
    together = draft_logits(runner, rows, _SIZE + 3)
    assert len(together) == _SIZE, "drafts must fit the row's spare block"
    for i in range(0, num_rows, max(1, num_rows // 5)):
        for one, every in zip(draft_logits(runner, rows[i : i + 1], _SIZE), together, strict=True):
            if num_rows == 4:
                assert (one[0] == every[i]).all()
            else:  # the layer's parts round in between, a compiled program does not
                assert (one[0] - every[i]).abs().mean() < 0.05 * one.abs().mean()


@needs_compiler
def test_separate_heads_use_int8_weights_with_kernels(
    tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: Counter[str] = Counter()

    def counted(name: str) -> None:
        plain = getattr(PackedMatrix, name)

        def pack(*args: Any) -> PackedMatrix:
            packed[name] += 1
            matrix: PackedMatrix = plain(*args)
            return matrix

        monkeypatch.setattr(PackedMatrix, name, pack)

    for name in ("bf16", "int8"):
        counted(name)
    directory, _ = tiny_model("llama")
    make_runner(directory, dtype="bfloat16", num_blocks=4)
    of_model = packed.copy()
    assert not packed["int8"] and packed["bf16"]
    packed.clear()
    (tmp_path / "eagle").mkdir()
    write_eagle(tmp_path / "eagle")
    make_runner(directory, dtype="bfloat16", num_blocks=4, heads=HeadsPlace("eagle", tmp_path / "eagle"))
    assert packed["int8"] > 5 and packed["bf16"] == of_model["bf16"], "the model's weights must stay bf16"
    (tmp_path / "mtp").mkdir()
    write_mtp(tmp_path / "mtp")
    packed.clear()
    make_runner(tmp_path / "mtp", dtype="bfloat16", num_blocks=4, heads=HeadsPlace("mtp", tmp_path / "mtp"))
    assert not packed["int8"], "MTP weights must stay bf16"
