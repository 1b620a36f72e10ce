"""Two hundred requests at once, of every kind: with drafts, by whom they may be, their answers are what they are
without, token for token and logprob for logprob."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from cluster.model.draft_heads import HeadsPlace
from cluster.words.request import BRANCHES
from engine.draft_models.draft_model import DraftModel
from engine.draft_models.head_proposer import HeadProposer
from engine.draft_models.own_layers import OwnLayers
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner import ModelRunner
from engine.speculation.proposer import Computing
from engine.speculation.speculation import Speculation
from tests.engine.asked import Asked, answers, check_with_leavers, compare, letters_grammar, one_of_each_kind
from tests.engine.draft_models.smaller_model import first_layers
from tests.engine.heads.eagle1_files import write_eagle1
from tests.engine.heads.head_files import write_eagle, write_medusa
from tests.engine.heads.mtp_files import write_mtp
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

_NUM_PROMPTS = 200
_ROOM = SchedulerConfig(max_batch_tokens=192, max_running=40, max_waiting=_NUM_PROMPTS)

_WRITERS: Mapping[str, Callable[[Path], object]] = {
    "medusa": write_medusa,
    "eagle": write_eagle,
    "eagle1": write_eagle1,
    "mtp": write_mtp,
}

MakeDrafts = Callable[[BlockManager], Mapping[str, Computing]]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[Asked]:
    """Texts that repeat themselves, too."""
    kinds = one_of_each_kind(letters_grammar(tmp_path_factory.mktemp("letters")))
    random = Random(5)
    lengths = [random.randrange(3, 48) for _ in range(_NUM_PROMPTS)]
    found: list[Asked] = []
    for number, prompt in enumerate(prompts(*lengths)):
        kind = kinds[number % len(kinds)]
        tokens = prompt[: len(prompt) // 2] * 2 if number % 3 == 0 else prompt
        seed = None if kind.sampling.seed is None else 1000 + number
        found.append(replace(kind, prompt=tokens or prompt, sampling=replace(kind.sampling, seed=seed)))
    return found


def _with_heads(kind: str, target: Path, directory: Path, make_runner: MakeRunner) -> tuple[ModelRunner, MakeDrafts]:
    _WRITERS[kind](directory)
    name = "eagle" if kind == "eagle1" else kind
    model_dir = directory if kind == "mtp" else target
    runner = make_runner(model_dir, num_blocks=2048, heads=HeadsPlace(name, directory))
    return runner, lambda blocks: {name: HeadProposer(runner)}


@pytest.mark.parametrize(
    "method", ["ngram", "suffix", "draft", "self", "medusa", "eagle", "eagle1", "mtp", "auto: all but mtp"]
)
def test_answers_are_what_they_are_without_drafts(
    method: str, asked: list[Asked], tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """In batches; in a pool where some are preempted, with steps that run ahead; and with some that leave."""
    target = tiny_model("llama")[0]
    runner = make_runner(target, num_blocks=2048)
    computing: MakeDrafts = lambda blocks: {}  # noqa: E731
    small = partial(make_runner, first_layers(target, 2), num_blocks=1024)
    if method in ("medusa", "eagle", "eagle1", "mtp"):
        runner, computing = _with_heads(method, target, tmp_path, make_runner)
    elif method == "draft":
        computing = lambda blocks: {"draft": DraftModel(small(), vocab_size=VOCAB_SIZE)}  # noqa: E731
    elif method == "self":
        computing = lambda blocks: {"self": OwnLayers(runner, blocks, before_writing=lambda: None)}  # noqa: E731
    elif method.startswith("auto"):
        runner, heads = _with_heads("eagle", target, tmp_path, make_runner)

        def computing(blocks: BlockManager) -> Mapping[str, Computing]:
            draft = DraftModel(small(), vocab_size=VOCAB_SIZE)
            return {"draft": draft, "self": OwnLayers(runner, blocks, before_writing=lambda: None), **heads(blocks)}

    made: list[Speculation] = []

    def speculation(blocks: BlockManager) -> Speculation:
        chosen = "auto" if method.startswith("auto") else "eagle" if method == "eagle1" else method
        made.append(Speculation.of(chosen, max_tokens=6, vocab_size=VOCAB_SIZE, computing=computing(blocks)))
        return made[-1]

    expected = answers(runner, asked, _ROOM, 2048)
    found = answers(runner, asked, _ROOM, 2048, speculation=speculation)
    compare(found, expected)
    tight = answers(runner, asked, _ROOM, 80, runs_ahead=True, speculation=speculation)
    compare(tight, expected)
    assert tight.num_preemptions
    blocks = BlockManager(2048)
    check_with_leavers(runner, asked, expected, speculation(blocks), blocks=blocks)
    drafted = [sum(counts.drafted.total() for counts in one.counts.values()) for one in made]
    assert min(drafted) > 10 and sum(drafted) > 300  # who computes is hardly asked while it is right by chance alone
    in_branches = [one.counts[BRANCHES].drafted.total() for one in made]
    assert any(in_branches) == (method != "ngram")
