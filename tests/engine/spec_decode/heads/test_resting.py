"""Resting heads: which work they skip, for which sequences they cannot draft afterwards, and correct drafts for the
rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import engine.runner.runner
from core.model.draft_heads import HeadsPlace
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.runner.runner import ModelRunner
from engine.spec_decode.heads.eagle_layers import Eagle3Layer
from engine.spec_decode.heads.head_row import HeadRow
from tests.engine.spec_decode.heads.head_files import eagle_reference, write_eagle
from tests.engine.spec_decode.proposers import likeliest_draft
from tests.engine.steps import prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

_SIZE = 8
_FEW = 20  # tokens of an answer that are deferred
_TABLES = [[*range(12)], [*range(12, 24)]]
_OTHER = [*range(24, 36)]


class Case:
    """Model with an EAGLE-3 head, and two sequences with fixed tokens."""

    def __init__(self, runner: ModelRunner, model: PreTrainedModel, tensors: Any) -> None:
        assert runner.heads
        self.runner, self.heads = runner, runner.heads
        self.tokens = prompts(90, 90)
        self._model, self._tensors = model, tensors

    def prompt(self, row: int, num_tokens: int = 13) -> None:
        self._forward([Row(self.tokens[row][:num_tokens], 0, _TABLES[row], num_logits=1)])

    def steps(self, start: int, end: int, rows: Seq[int] = (0, 1)) -> None:
        """Run steps that compute one token of each row."""
        for at in range(start, end):
            self._forward([Row(self.tokens[row][at : at + 1], at, _TABLES[row], num_logits=1) for row in rows])

    def row(self, row: int, num_computed: int, blocks: Seq[int] = ()) -> HeadRow:
        return HeadRow(self.tokens[row][num_computed], num_computed, blocks or _TABLES[row])

    def guess(self, row: HeadRow) -> list[int]:
        return likeliest_draft(self.runner, row, 3)

    def expected(self, row: int, num_computed: int) -> list[int]:
        tokens = self.tokens[row][: num_computed + 1]
        return eagle_reference(self._model, self._tensors, tokens, 3, layers=(0, 1, 2))

    def _forward(self, rows: list[Row]) -> None:
        self.runner.forward(Batch.of(rows, block_size=_SIZE))


@pytest.fixture
def case(tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path) -> Case:
    directory, model = tiny_model("llama")
    tensors = write_eagle(tmp_path)
    return Case(make_runner(directory, num_blocks=40, heads=HeadsPlace("eagle", tmp_path)), model, tensors)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the tokens that the head's layer computes, and the steps whose hidden states it reads."""
    counts: Counter[str] = Counter()

    def counted(name: str, at: int) -> None:
        plain = getattr(Eagle3Layer, name)

        def call(self: Eagle3Layer, *args: Any) -> Any:
            counts[name] += len(args[at])
            return plain(self, *args)

        monkeypatch.setattr(Eagle3Layer, name, call)

    counted("features", 0)
    counted("keep", 1)
    counted("__call__", 2)

    def aux_hidden_states(layers: Seq[int]) -> AuxHiddenStates:
        counts["taps"] += 1
        return AuxHiddenStates(layers)

    monkeypatch.setattr(engine.runner.runner, "AuxHiddenStates", aux_hidden_states)
    return counts


def test_resting_heads_compute_nothing_in_decode_steps(case: Case, counts: Counter[str]) -> None:
    for row in (0, 1):
        case.prompt(row)
    case.runner.rest(_FEW)
    counts.clear()
    case.steps(13, 85)
    assert counts == {"taps": _FEW}, "later tokens of an answer must not even keep hidden states"
    case.runner.rest(None)
    case.steps(85, 88)
    case.runner.settle()
    assert counts["keep"] == 2 * _FEW, "expected only the deferred tokens, and none behind passed-over ones"


def test_heads_without_trials_collect_no_state(case: Case, counts: Counter[str]) -> None:
    case.prompt(0)
    case.runner.rest(_FEW)
    case.steps(13, 20, [0])
    case.runner.rest(0)
    assert case.heads.num_behind(case.row(0, 20)) == 7, "deferred tokens stay usable until their sequence continues"
    case.prompt(1)
    counts.clear()
    case.steps(13, 20, [1])
    assert not counts and case.heads.num_behind(case.row(1, 20)) is None, "a new sequence must not be followed, either"
    case.steps(20, 21, [0])
    case.runner.rest(_FEW)
    case.steps(20, 24, [1])
    case.steps(21, 24, [0])
    assert not counts, "it must not be followed later"
    assert case.heads.num_behind(case.row(0, 24)) is None and not case.guess(case.row(1, 24))
    case.prompt(1)
    case.steps(13, 20, [1])
    assert case.guess(case.row(1, 20)) == case.expected(1, 20), "a sequence that begins after the change is followed"


def test_early_draft_of_resting_heads_catches_up_one_row(case: Case, counts: Counter[str]) -> None:
    for row in (0, 1):
        case.prompt(row)
    case.runner.rest(_FEW)
    case.steps(13, 30)
    counts.clear()
    assert [case.heads.num_behind(case.row(row, 30)) for row in (0, 1)] == [17, 17]
    case.runner.catch_up([case.row(0, 30)], 10)
    assert case.heads.num_behind(case.row(0, 30)) == 7 and counts["keep"] == 10
    assert case.guess(case.row(0, 30)) == case.expected(0, 30)
    assert counts["keep"] == 17
    assert [case.heads.num_behind(case.row(row, 30)) for row in (0, 1)] == [0, 17]
    case.steps(30, 48)
    assert case.guess(case.row(0, 48)) == case.expected(0, 48), "tokens after a draft are deferred again"
    assert case.heads.num_behind(case.row(1, 48)) is None and not case.guess(case.row(1, 48))


@pytest.mark.parametrize("num_tokens", [71, 72], ids=["in a block", "at the end of one"])
def test_passed_over_mark_moves_with_sequence_and_blocks(case: Case, num_tokens: int) -> None:
    """No receiver of the sequence or of its blocks uses the missing keys."""
    case.prompt(0)
    case.runner.rest(_FEW)
    case.steps(13, num_tokens, [0])
    assert case.heads.num_behind(case.row(0, num_tokens)) is None
    case.runner.settle()
    features = case.heads.features.of(_TABLES[0], num_tokens)
    assert features and not any(features)
    for source, target in zip(_TABLES[0], _OTHER, strict=True):
        case.runner.pool.copy_block(source, target)
    case.heads.features.arrived(_OTHER, 0, num_tokens, features)
    case.runner.rest(None)
    assert case.heads.num_behind(case.row(0, num_tokens, _OTHER)) is None
    following = Row(case.tokens[0][num_tokens : num_tokens + 9], num_tokens, _OTHER, num_logits=1)
    case.runner.forward(Batch.of([following], block_size=_SIZE))
    assert case.heads.num_behind(case.row(0, num_tokens + 9, _OTHER)) is None, "later positions are passed over, too"
    case.runner.forward(Batch.of([Row(case.tokens[1][:20], 0, _OTHER, num_logits=1)], block_size=_SIZE))
    assert case.guess(case.row(1, 20, _OTHER)) == case.expected(1, 20), "a new owner of the blocks is not affected"


def test_settle_writes_or_passes_over_deferred_entries(case: Case, counts: Counter[str]) -> None:
    assert case.heads.features.of(_TABLES[0], 13) == b"", "expected neither a feature nor a mark"
    for row in (0, 1):
        case.prompt(row)
    case.runner.rest(_FEW)
    case.steps(13, 20)
    counts.clear()
    case.runner.settle()
    assert not counts and case.heads.num_behind(case.row(0, 20)) is None
    case.steps(20, 21)
    assert case.heads.num_behind(case.row(0, 21)) is None, "positions behind it are passed over, too"
    case.prompt(0)
    assert case.guess(case.row(0, 13)) == case.expected(0, 13), "a new sequence is followed"
    case.runner.rest(None)
    case.steps(13, 40, [0])
    case.runner.settle()
    assert case.guess(case.row(0, 40)) == case.expected(0, 40)
    features = case.heads.features.of(_TABLES[0], 40)
    assert any(features)
