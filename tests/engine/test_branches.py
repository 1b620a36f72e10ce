"""Branching drafts: answers equal those without drafts token for token, and sequences continue in branches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.model.draft_heads import HeadsPlace
from core.types.request import BRANCHES, Sampling
from engine.cpu.library import open_kernels
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.spec_decode.draft import Branch
from engine.spec_decode.draft_models.head_proposer import HeadProposer
from engine.spec_decode.proposer import Proposer
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.suffix import Corpus, Scope, Suffix
from tests.engine.asked import (
    AMPLE,
    Asked,
    Branching,
    Oracle,
    answers,
    check_with_leavers,
    compare,
    letters_grammar,
    num_in_branches,
    one_of_each_kind,
)
from tests.engine.spec_decode.heads.eagle1_files import write_eagle1
from tests.engine.spec_decode.heads.head_files import write_eagle, write_medusa
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.spec_decode.proposers import FakeProposer
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

_ROOM = SchedulerConfig(max_batch_tokens=512, max_running=256, max_waiting=32)
_SMALL = SchedulerConfig(max_batch_tokens=64, max_running=48, max_waiting=32)


@pytest.fixture
def runner(tiny_model: MakeModel, make_runner: MakeRunner) -> ModelRunner:
    return make_runner(tiny_model("llama")[0], num_blocks=512)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[Asked]:
    return one_of_each_kind(letters_grammar(tmp_path_factory.mktemp("letters")))


def _speculation(**methods: Proposer) -> Speculation:
    return Speculation(methods, max_tokens=6, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("every", [1, 2, 3, 4])
@pytest.mark.parametrize("num_blocks", [512, 56])
def test_right_branches_do_not_change_answers(
    every: int, num_blocks: int, runner: ModelRunner, asked: list[Asked]
) -> None:
    """In small steps, and in a pool with preemption, where drafts have little room."""
    expected = answers(runner, asked)
    speculation = _speculation(tree=Branching(expected, asked, every=every))
    found = answers(runner, asked, _ROOM if num_blocks == 512 else _SMALL, num_blocks, speculation=speculation)
    compare(found, expected)
    assert num_in_branches(speculation) > 10
    assert bool(found.num_preemptions) == (num_blocks < 512)


def test_right_branch_saves_as_many_steps_as_right_draft(runner: ModelRunner) -> None:
    ask = [Asked(prompt, Sampling(max_tokens=29, temperature=0.7, seed=1)) for prompt in prompts(11, 12)]
    expected = answers(runner, ask)
    speculation = _speculation(tree=Branching(expected, ask, every=1))  # right only in its branches
    found = answers(runner, ask, _ROOM, speculation=speculation)
    compare(found, expected)
    assert expected.num_steps == 29 and found.num_steps == 1 + 4  # 28 tokens, 7 a step
    counts = speculation.counts
    assert counts["tree"].accepted.total() == 0
    assert counts[BRANCHES].accepted == {place: 8 for place in range(6)}
    assert counts[BRANCHES].drafted == {place: 16 for place in range(6)}


def test_late_and_cancelled_requests_do_not_change_answers(runner: ModelRunner, asked: list[Asked]) -> None:
    expected = answers(runner, asked)
    speculation = _speculation(tree=Branching(expected, asked, every=3))
    check_with_leavers(runner, asked, expected, speculation, blocks=BlockManager(400))
    assert num_in_branches(speculation) > 10


@pytest.mark.skipif(
    open_kernels(dtype=torch.bfloat16, device=torch.device("cpu")) is None, reason="no C++ compiler here"
)
def test_deterministic_answers_are_bitwise_equal_with_drafts(
    tiny_model: MakeModel, make_runner: MakeRunner, asked: list[Asked]
) -> None:
    runner = make_runner(tiny_model("llama")[0], num_blocks=512, dtype="bfloat16", deterministic=True)
    expected = answers(runner, asked)
    speculation = _speculation(tree=Branching(expected, asked, every=3))
    for config, num_blocks in ((_ROOM, 512), (_SMALL, 56)):
        found = answers(runner, asked, config, num_blocks, speculation=speculation)
        assert found.tokens == expected.tokens, "tokens and log-probabilities"
    assert num_in_branches(speculation) > 60


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "deepseek_v3"])
def test_other_model_families(family: str, tiny_model: MakeModel, make_runner: MakeRunner, asked: list[Asked]) -> None:
    runner = make_runner(tiny_model(family)[0], num_blocks=512)
    expected = answers(runner, asked)
    speculation = _speculation(tree=Branching(expected, asked, every=3))
    # Attention over latents sums in another order for one query than for several, so float32 rounds differently.
    found = answers(runner, asked, _ROOM, speculation=speculation)
    compare(found, expected, atol=1e-3 if "deepseek" in family else 1e-4)
    assert num_in_branches(speculation) > 20


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("copy", lambda self, sequence: None),
        ("take_over", lambda self, sequence: None),
    ],
)
def test_faulty_branch_changes_answers(
    name: str, fault: object, runner: ModelRunner, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(runner, asked)
    monkeypatch.setattr(Branch, name, fault)
    found = answers(runner, asked, _ROOM, speculation=_speculation(tree=Branching(expected, asked, every=3)))
    assert found.ids != expected.ids


class TestOurs:
    """Proposers with their own branches; the number and choice of branches is tested elsewhere."""

    def test_places_in_texts(self, runner: ModelRunner, asked: list[Asked]) -> None:
        """Earlier answers are similar, one of them identical."""
        expected, corpus = answers(runner, asked), Corpus()
        for outputs in expected.ids:
            nearly = [(token + 1) % VOCAB_SIZE if i % 4 == 3 else token for i, token in enumerate(outputs)]
            for answer in (nearly, outputs, nearly):
                corpus.add(Scope("", "", ""), answer)
        speculation = _speculation(suffix=Suffix(corpus))
        compare(answers(runner, asked, _ROOM, speculation=speculation), expected)
        assert num_in_branches(speculation) > 20

    @pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle1", "mtp"])
    @pytest.mark.parametrize("num_blocks", [512, 56])
    def test_heads(
        self,
        kind: str,
        num_blocks: int,
        asked: list[Asked],
        tiny_model: MakeModel,
        make_runner: MakeRunner,
        tmp_path: Path,
    ) -> None:
        write = {"medusa": write_medusa, "eagle": write_eagle, "eagle1": write_eagle1, "mtp": write_mtp}[kind]
        write(tmp_path)
        model_dir = tmp_path if kind == "mtp" else tiny_model("llama")[0]
        name = "eagle" if kind == "eagle1" else kind
        runner = make_runner(model_dir, num_blocks=512, heads=HeadsPlace(name, tmp_path))
        expected = answers(runner, asked)
        speculation = _speculation(heads=HeadProposer(runner, by_place=kind == "medusa"))
        found = answers(runner, asked, _ROOM if num_blocks == 512 else _SMALL, num_blocks, speculation=speculation)
        compare(found, expected, atol=1e-3 if kind == "mtp" else 1e-4)
        assert speculation.counts[BRANCHES].drafted.total() > 100
        assert bool(found.num_preemptions) == (num_blocks < 512)

    def test_two_methods_in_one_step(self, runner: ModelRunner, asked: list[Asked]) -> None:
        """Each method is wrong where the other is right."""
        expected = answers(runner, asked)
        speculation = _speculation(
            one=FakeProposer(Oracle(expected, asked, lambda i: i % 5 > 1)),
            other=FakeProposer(Oracle(expected, asked, lambda i: i % 5 < 3)),
        )
        found = answers(runner, asked, _ROOM, speculation=speculation)
        compare(found, expected)
        assert found.num_accepted > 20


def test_with_logits_limited_to_max_running(runner: ModelRunner, asked: list[Asked]) -> None:
    """With no more logits than max_running."""
    expected = answers(runner, asked)
    compare(answers(runner, asked, AMPLE, speculation=_speculation(t=Branching(expected, asked, every=2))), expected)
