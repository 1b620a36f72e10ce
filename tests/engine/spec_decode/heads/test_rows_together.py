"""Drafts and features of a row do not depend on the rows beside it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.model.draft_heads import HeadsPlace
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.cpu.library import open_kernels
from engine.layers.packed_matrix import PackedMatrix
from engine.runner.runner import ModelRunner
from engine.spec_decode.heads.head_row import HeadLogits, HeadRow
from tests.engine.spec_decode.heads.head_files import eagle_reference, write_eagle
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.steps import prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

_SIZE = 8
_NUM_TOKENS = 3
_has_compiler = open_kernels(dtype=torch.bfloat16, device=torch.device("cpu")) is not None
_needs_compiler = pytest.mark.skipif(not _has_compiler, reason="no C++ compiler here")


def _compute(runner: ModelRunner, *rows: Row) -> None:
    runner.forward(Batch.of(rows, block_size=_SIZE))


def _drafted(runner: ModelRunner, rows: Seq[HeadRow], num_places: int) -> list[Tensor]:
    """Return the logits of all rows by place, drafting the same tokens for all of them."""
    logits: list[Tensor] = []

    def choose(found: HeadLogits, known: Seq[int], place: int) -> list[int]:
        assert list(known) == [*range(len(rows))]
        logits.append(found.values_RD.clone())
        return [5 + place] * len(rows)

    runner.draft(rows, num_places, choose)
    return logits


@pytest.mark.parametrize("num_first", [None, 20], ids=["asked", "resting"])
def test_deferred_entries_in_any_order_keep_their_sequence(
    num_first: int | None, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    directory, model = tiny_model("llama")
    tensors = write_eagle(tmp_path)
    runner = make_runner(directory, num_blocks=40, heads=HeadsPlace("eagle", tmp_path))
    every, tables, generator = prompts(70, 70, 70), [[*range(n, n + 10)] for n in (0, 10, 20)], random.Random(3)

    def row(number: int) -> HeadRow:
        return HeadRow(every[number][ends[number]], ends[number], tables[number])

    def guess(number: int) -> list[int]:
        drafts: list[int] = []

        def choose(found: HeadLogits, known: Seq[int], place: int) -> list[int]:
            assert found.ids_D is not None
            drafts.append(int(found.ids_D[found.values_RD[0].argmax()]))
            return drafts[-1:]

        runner.draft([row(number)], _NUM_TOKENS, choose)
        return drafts

    ends = [9, 13, 16]
    for tokens, end, table in zip(every, ends, tables, strict=True):
        _compute(runner, Row(tokens[:end], 0, table, num_logits=1))
    runner.rest(num_first)
    for number in range(10):
        some_of = [generator.sample(range(3), generator.randrange(1, 4)) for _ in range(generator.randrange(2, 6))]
        for some in some_of if number else [[0, 1], [1, 0], [1]]:  # whose first and last place is the same in any case
            _compute(runner, *[Row([every[i][ends[i]]], ends[i], tables[i], num_logits=1) for i in some])
            for i in some:
                ends[i] += 1
        if number and generator.random() < 0.5:
            runner.catch_up([row(i) for i in generator.sample(range(3), 2)])
        for i in generator.sample(range(3), 3):
            expected = eagle_reference(model, tensors, every[i][: ends[i] + 1], _NUM_TOKENS, layers=(0, 1, 2))
            assert guess(i) == expected
    apart = make_runner(directory, num_blocks=40, heads=HeadsPlace("eagle", tmp_path))
    for tokens, end, table in zip(every, ends, tables, strict=True):
        _compute(apart, Row(tokens[:end], 0, table, num_logits=1))
        blocks = torch.tensor(table)
        ours, theirs = (one.pool.read(3, blocks, torch.float32)[:, :, :end] for one in (runner, apart))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@_needs_compiler
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
    together = _drafted(runner, rows, _SIZE + 3)
    assert len(together) == _SIZE, "drafts must fit the row's spare block"
    for i in range(0, num_rows, max(1, num_rows // 5)):
        for one, every in zip(_drafted(runner, rows[i : i + 1], _SIZE), together, strict=True):
            if num_rows == 4:
                assert (one[0] == every[i]).all()
            else:  # the layer's parts round in between, a compiled program does not
                assert (one[0] - every[i]).abs().mean() < 0.05 * one.abs().mean()


@_needs_compiler
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
