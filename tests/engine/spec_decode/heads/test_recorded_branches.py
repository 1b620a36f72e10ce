"""Branching drafts with recorded steps: steps that fit a graph are replayed, with the same answers and drafts of
heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from core.model.draft_heads import HeadsPlace
from core.types.request import Sampling
from engine.config import EngineConfig
from engine.model.aux_hidden_states import StaticAuxHiddenStates
from engine.runner.decode_graphs import graph_sizes
from engine.runner.runner import ModelRunner
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.spec_decode.draft_models.draft_sampler import DraftSampler
from engine.spec_decode.draft_models.head_proposer import HeadProposer
from engine.spec_decode.speculation import Speculation
from tests.engine.asked import AMPLE, AnswerText, Asked, Branching, answers, num_in_branches
from tests.engine.counted_replays import FakeReplays
from tests.engine.spec_decode.heads.eagle1_files import write_eagle1
from tests.engine.spec_decode.heads.head_files import write_eagle, write_medusa
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel

pytestmark = pytest.mark.usefixtures("one_thread")

_NUM_TOKENS, _NUM_BLOCKS = 3, 256
_ROOM = replace(AMPLE, max_batch_tokens=96, max_running=64)
_FEW = 24  # tokens of the largest graph: a row with its branches has up to 18
_MANY = _ROOM.max_running  # as in a replica
_WRITERS: dict[str, Callable[[Path], object]] = {
    "medusa": write_medusa,
    "eagle": write_eagle,
    "eagle1": write_eagle1,
    "mtp": lambda directory: write_mtp(directory, first_k_dense_replace=4),  # on a CPU experts are called one by one
}
_ASKED = [
    Asked(prompt, Sampling(max_tokens=20 + 15 * i, temperature=0.7 * (i % 2), seed=i), num_choices=2 - i % 2)
    for i, prompt in enumerate(prompts(3, 40, 9, 17))
]


class _Step(NamedTuple):
    num_tokens: int
    num_branches: int
    is_replayed: bool


class _Watched:
    """Runner that records which steps were replayed."""

    def __init__(self, runner: ModelRunner, replays: FakeReplays) -> None:
        self.layout = runner.layout
        self._runner, self._replays = runner, replays
        self.steps: list[_Step] = []

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> Tensor | None:
        before = self._replays.num_replays
        logits = self._runner.execute(step, orders)
        if step:
            is_replayed = self._replays.num_replays > before
            self.steps.append(_Step(step.batch.num_tokens, len(step.branches), is_replayed))
        return logits


class _RecordingProposer:
    """Proposer of tree drafts that also calls the heads in every third step, and discards their drafts.

    So deferred entries exist while blocks are copied for branches.
    """

    def __init__(self, runner: ModelRunner, tree: Branching) -> None:
        self._heads = HeadProposer(runner, DraftSampler(learns=False))
        self._tree = tree
        self._num_looks = 0
        self.outputs: dict[tuple[str, int, int], list[int]] = {}  # by request, choice and number of tokens

    def propose(self, sequences: Any, max_tokens: int) -> Any:
        self._num_looks += 1
        if self._num_looks % 3 == 0:
            for one, proposal in zip(sequences, self._heads.propose(sequences, _NUM_TOKENS), strict=True):
                self.outputs[one.request.id, one.choice, len(one.tokens)] = list(proposal.tokens)
        return self._tree.propose(sequences, max_tokens)

    def finished(self, sequence: Sequence) -> None:
        pass


class _Models:
    """One model with heads of a kind, with and without recorded steps."""

    def __init__(self, kind: str, model_dir: Path, heads_dir: Path) -> None:
        heads = HeadsPlace("eagle" if kind == "eagle1" else kind, heads_dir)
        self._config = EngineConfig(
            model_dir=model_dir, dtype="float32", block_size=8, num_blocks=_NUM_BLOCKS, heads=heads
        )
        self.plain = ModelRunner(self._config)
        self.expected = answers(self.plain, _ASKED, num_blocks=_NUM_BLOCKS)

    def answer(self, recorded_rows: int) -> tuple[AnswerText, _RecordingProposer, list[_Step], Speculation]:
        """Answer with branching drafts. recorded_rows: 0 to launch every step."""
        replays = FakeReplays()
        runner = self.plain
        if recorded_rows:
            runner = ModelRunner(replace(self._config, recorded_rows=recorded_rows), capture=replays)
        watched = _Watched(runner, replays)
        recorder = _RecordingProposer(runner, Branching(self.expected, _ASKED, every=3))
        speculation = Speculation({"heads": recorder}, max_tokens=5, vocab_size=VOCAB_SIZE)
        replays.num_replays = 0
        outputs = answers(watched, _ASKED, _ROOM, _NUM_BLOCKS, speculation=speculation)  # type: ignore[arg-type]
        return outputs, recorder, watched.steps, speculation


@pytest.fixture
def models(request: pytest.FixtureRequest, tiny_model: MakeModel, tmp_path: Path) -> _Models:
    _WRITERS[request.param](tmp_path)
    return _Models(request.param, tmp_path if request.param == "mtp" else tiny_model("llama")[0], tmp_path)


@pytest.mark.parametrize("recorded_rows", [_FEW, _MANY])
@pytest.mark.parametrize("models", _WRITERS, indirect=True)
def test_branches_within_and_beyond_largest_graph(models: _Models, recorded_rows: int) -> None:
    outputs, recorder, steps, speculation = models.answer(recorded_rows)
    assert outputs.ids == models.expected.ids
    assert num_in_branches(speculation) > 20
    _, launched, *_ = models.answer(0)
    assert recorder.outputs == launched.outputs and sum(map(len, recorder.outputs.values())) > 40

    branching = [step for step in steps if step.num_branches]
    most = graph_sizes(recorded_rows)[-1]
    assert all(step.is_replayed == (step.num_tokens <= most) for step in branching)
    if recorded_rows == _FEW:
        kinds = [step.is_replayed for step in steps]
        assert True in kinds[kinds.index(False) :] and sum(not step.is_replayed for step in branching) > 3
        assert any(step.is_replayed for step in branching), "those of the last row"
    else:
        assert max(step.num_tokens for step in branching) == most, "whatever is drafted has room"
        assert len(branching) > 5 and len({step.num_branches for step in branching}) > 2


@pytest.mark.parametrize("models", ["medusa", "eagle"], indirect=True)
def test_stale_hidden_states_change_drafts(models: _Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The static hidden states of a replayed step differ from those of the step before it."""
    _, launched, *_ = models.answer(0)
    keep, num_kept = StaticAuxHiddenStates.keep, 0

    def keep_every_second(self: StaticAuxHiddenStates, aux_hidden_states: Any) -> None:
        nonlocal num_kept
        num_kept += 1
        if num_kept % 2:
            keep(self, aux_hidden_states)

    monkeypatch.setattr(StaticAuxHiddenStates, "keep", keep_every_second)
    outputs, recorder, *_ = models.answer(_MANY)
    assert outputs.ids == models.expected.ids, "heads must not change answers"
    assert recorder.outputs != launched.outputs
