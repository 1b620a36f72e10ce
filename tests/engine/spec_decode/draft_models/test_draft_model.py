"""DraftModel: its proposals, its own pool, and the release of blocks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from core.types.request import Sampling
from engine.config import EngineConfig
from engine.runner.decode_graphs import graph_sizes
from engine.runner.runner import ModelRunner
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.draft_model import DraftModel, bytes_of
from engine.spec_decode.draft_models.draft_tables import DraftTables
from tests.engine.engine_requests import Asked, answers, sequence_of
from tests.engine.fake_capture import FakeReplays
from tests.engine.spec_decode import proposers
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

_SIZE = 8
_SAMPLINGS = (
    Sampling(temperature=0.0, max_tokens=40),
    Sampling(temperature=1.0, seed=3, max_tokens=40),
    Sampling(temperature=0.7, seed=4, top_k=9, top_p=0.9, min_p=0.02, max_tokens=40),
)


@pytest.fixture
def runner(tiny_model: MakeModel, make_runner: MakeRunner) -> ModelRunner:
    return make_runner(tiny_model("llama")[0])


@pytest.fixture
def recorded(tiny_model: MakeModel) -> ModelRunner:
    """Return a draft model whose steps are replayed, unless they are too long."""
    config = EngineConfig(
        model_dir=tiny_model("llama")[0], dtype="float32", block_size=_SIZE, num_blocks=96, recorded_rows=8
    )

    return ModelRunner(config, capture=FakeReplays())


def _draft(runner: ModelRunner) -> DraftModel:
    return DraftModel(runner, vocab_size=VOCAB_SIZE)


def _asked(*lengths: int) -> list[Asked]:
    return [Asked(prompt, _SAMPLINGS[i % len(_SAMPLINGS)]) for i, prompt in enumerate(prompts(*lengths))]


def _sequences(asked: list[Asked]) -> list[Sequence]:
    return [sequence_of(one, str(i), block_size=_SIZE) for i, one in enumerate(asked)]


@pytest.mark.parametrize("kind", ["runner", "recorded"])
def test_same_model_drafts_every_token_right(runner: ModelRunner, kind: str, request: pytest.FixtureRequest) -> None:
    """Greedy and sampled, after a prompt, after right drafts, and after wrong ones."""
    asked = _asked(7, 19, 24, 33, 8)
    expected = answers(runner, asked).ids
    draft, generator = _draft(request.getfixturevalue(kind)), random.Random(0)
    sequences = _sequences(asked)
    done = [0] * len(sequences)
    while any(count < 30 for count in done):
        rows = [i for i, count in enumerate(done) if count < 30 and generator.random() < 0.7]
        depth = generator.randrange(1, 7)
        proposals = draft.propose([sequences[i] for i in rows], depth)
        for i, proposal in zip(rows, proposals, strict=True):
            assert list(proposal.tokens) == expected[i][done[i] : done[i] + depth]
            assert len(proposal.kinds) == depth
            taken = generator.randrange(depth + 2)
            sequences[i].tokens += expected[i][done[i] : done[i] + taken]
            done[i] += taken
        draft.tables.blocks.check_integrity()


def test_proposals_depend_on_tokens_only(runner: ModelRunner) -> None:
    """Not on wrong drafts, pieces of a prompt, other rows, or evictions from a small pool."""
    asked = _asked(30, 41, 22, 17)
    alone = [proposers.propose(_draft(runner), sequence, 5) for sequence in _sequences(asked)]
    draft = DraftModel(runner, vocab_size=VOCAB_SIZE)
    draft.tables = DraftTables(9, block_size=_SIZE)
    generator = random.Random(1)
    sequences = _sequences(asked)
    for _ in range(60):
        i = generator.randrange(len(sequences))
        sequence = sequences[i]
        match generator.randrange(3):
            case 0:
                draft.catch_up(sequence, generator.randrange(1, 20))
            case 1:
                sequence.tokens.append(generator.randrange(VOCAB_SIZE))
                proposers.propose(draft, sequence, 3)
                sequence.tokens.pop()
                draft.forget(sequence)
            case 2:
                assert proposers.propose(draft, sequence, 5) == alone[i]
        draft.tables.blocks.check_integrity()


def test_num_behind_equals_tokens_to_compute(runner: ModelRunner) -> None:
    draft = _draft(runner)
    (sequence,) = _sequences(_asked(30))
    assert draft.num_behind(sequence) == 30
    draft.catch_up(sequence, 12)
    assert draft.num_behind(sequence) == 18
    draft.catch_up(sequence, 100)
    assert draft.num_behind(sequence) == 1, "the last token is computed by propose only"
    drafted = list(proposers.propose(draft, sequence, 4).tokens)
    sequence.tokens += [*drafted, 5]
    assert draft.num_behind(sequence) == 2, "expected the last draft token and the one after it"
    drafted = list(proposers.propose(draft, sequence, 4).tokens)
    sequence.tokens += [*drafted[:2], (drafted[2] + 1) % VOCAB_SIZE]
    assert draft.num_behind(sequence) == 1
    proposers.propose(draft, sequence, 4)
    sequence.tokens += [7, 8, 9]
    assert draft.num_behind(sequence) in (2, 3)


def test_blocks_are_freed_on_forget(runner: ModelRunner) -> None:
    draft = _draft(runner)
    blocks = draft.tables.blocks
    sequences = _sequences(_asked(30, 20, 25))
    draft.propose(sequences, 5)
    assert blocks.num_available < blocks.num_blocks
    for sequence in (sequences[0], sequences[0], sequences[1]):
        draft.forget(sequence)
    del sequences[:2]
    draft.propose(sequences, 1)
    assert len(draft.tables) == 1
    assert blocks.num_blocks - blocks.num_available == 4
    draft.forget(sequences[0])
    assert blocks.num_available == blocks.num_blocks and not len(draft.tables)


def test_blocks_of_rejected_tokens_are_freed(runner: ModelRunner) -> None:
    draft = _draft(runner)
    (sequence,) = _sequences(_asked(15))
    draft.propose([sequence], 20)
    blocks = draft.tables.blocks
    assert blocks.num_blocks - blocks.num_available == 5  # of 8 tokens: 34 are computed
    sequence.tokens.append(1)
    draft.propose([sequence], 1)
    assert blocks.num_blocks - blocks.num_available == 2


def test_unread_block_changes_do_not_accumulate() -> None:
    """A replica that runs for months drafts for millions of sequences."""
    tables = DraftTables(8, block_size=_SIZE)
    for asked in _asked(*[40] * 50):
        (sequence,) = _sequences([asked])
        table = tables.open(sequence, 40, keep=[sequence])
        assert table
        tables.computed(sequence, table, 40 - table.num_known)
        tables.forget(sequence)
    assert len(tables.blocks.take_changes()) <= 2 * tables.blocks.num_blocks


def test_common_prefix_is_computed_once(runner: ModelRunner) -> None:
    draft = _draft(runner)
    first, second = _sequences(_asked(30) * 2)
    proposers.propose(draft, first, 2)
    assert draft.num_behind(second) == 30 - 24
    assert proposers.propose(draft, second, 4) == proposers.propose(_draft(runner), second, 4)


def test_no_proposal_without_room(runner: ModelRunner) -> None:
    draft = _draft(runner)
    draft.tables = DraftTables(4, block_size=_SIZE)
    long, short = _sequences(_asked(60, 9))
    outputs = draft.propose([long, short], 3)
    assert not outputs[0].tokens and len(outputs[1].tokens) == 3
    draft.catch_up(long, 100)
    assert draft.num_behind(long) == 60


def test_no_proposal_for_unknown_tokens_or_long_sequences(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    draft = DraftModel(make_runner(tiny_model("llama", vocab_size=100)[0]), vocab_size=VOCAB_SIZE)
    known, foreign, longest = _sequences(
        [Asked([5] * 9, _SAMPLINGS[0]), Asked([5, 120, 6], _SAMPLINGS[0]), Asked([5] * 128, _SAMPLINGS[0])]
    )
    assert draft.num_behind(known) == 9
    assert draft.num_behind(foreign) is None and draft.num_behind(longest) is None
    longest.tokens = [5] * 126
    assert 1 <= len(proposers.propose(draft, longest, 8).tokens) <= 3


def test_drafts_ignore_rules_and_penalties(runner: ModelRunner) -> None:
    (plain,) = _sequences([Asked(prompts(20)[0], _SAMPLINGS[1])])
    asked = replace(_SAMPLINGS[1], presence_penalty=2.0, min_tokens=5, num_logprobs=2, stop_token_ids=(3,))
    (penalised,) = _sequences([Asked(prompts(20)[0], asked)])
    assert proposers.propose(_draft(runner), plain, 6) == proposers.propose(_draft(runner), penalised, 6)


def test_memory_estimate_includes_recorded_steps(tiny_model: MakeModel) -> None:
    config = EngineConfig(model_dir=tiny_model("llama")[0], device="cuda", max_running=8)
    launched, recorded = (bytes_of(replace(config, recorded_rows=rows)) for rows in (0, 8))
    assert recorded - launched >= len(graph_sizes(8)) << 20
