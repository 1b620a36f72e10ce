"""Model drafts: answers equal those without drafts token for token, for every model and kind of request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from core.grammar.compiler import CompiledGrammar
from core.model.draft_heads import HeadsPlace
from core.types.errors import SpecError
from core.types.request import Sampling
from engine.config import EngineConfig
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.scheduler.step_commands import Orders
from engine.spec_decode.draft_models.draft_model import DraftModel, HeadProposer, OwnLayers
from engine.spec_decode.proposer import ModelProposer
from engine.spec_decode.speculation import Speculation
from tests.engine.engine_requests import (
    AMPLE,
    Asked,
    answers,
    check_with_leavers,
    compare,
    letters_grammar,
    one_of_each_kind,
    sequence_of,
)
from tests.engine.kv.test_window_parts import FAMILIES
from tests.engine.spec_decode.draft_models.smaller_model import first_layers
from tests.engine.spec_decode.heads.eagle1_files import write_eagle1
from tests.engine.spec_decode.heads.head_files import write_eagle
from tests.engine.spec_decode.proposers import Recorded
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import DELTA_NET, MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

_SMALL = SchedulerConfig(max_batch_tokens=48, max_running=24, max_waiting=32)

Drafts = Callable[[BlockManager], Speculation]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[Asked]:
    grammar: CompiledGrammar = letters_grammar(tmp_path_factory.mktemp("letters"))
    return one_of_each_kind(grammar)


@pytest.fixture
def model_dir(tiny_model: MakeModel) -> Path:
    return tiny_model("llama")[0]


@pytest.fixture
def runner(model_dir: Path, make_runner: MakeRunner) -> ModelRunner:
    return make_runner(model_dir, num_blocks=512)


@pytest.fixture(params=["draft", "the model itself", "self"])
def drafts(request: pytest.FixtureRequest, runner: ModelRunner, model_dir: Path, make_runner: MakeRunner) -> Drafts:
    """Speculations by a smaller model, by a model that is always right, and by the model's own layers."""

    def models(blocks: BlockManager) -> ModelProposer:
        if request.param == "self":
            return OwnLayers(runner, blocks, before_writing=lambda: None)
        own = first_layers(model_dir, 2) if request.param == "draft" else model_dir
        return DraftModel(make_runner(own, num_blocks=512), vocab_size=VOCAB_SIZE)

    def drafting(blocks: BlockManager) -> Speculation:
        """Make them with a fake clock, so that calls do not depend on the machine's speed."""
        asked, clock = {"m": models(blocks)}, partial(next, count(step=1e-3))
        return Speculation({}, models=asked, max_tokens=6, vocab_size=VOCAB_SIZE, clock=clock)

    return drafting


@pytest.mark.parametrize(
    ("config", "num_blocks", "is_async"), [(AMPLE, 512, False), (_SMALL, 48, True)], ids=["ample", "small, ahead"]
)
def test_model_drafts_do_not_change_answers(
    config: SchedulerConfig, num_blocks: int, is_async: bool, runner: ModelRunner, asked: list[Asked], drafts: Drafts
) -> None:
    """Also in small steps, and in a pool with preemption."""
    expected = answers(runner, asked)
    found = answers(runner, asked, config, num_blocks, is_async=is_async, speculation=drafts)
    compare(found, expected)
    assert found.num_accepted > 5
    assert bool(found.num_preemptions) == (num_blocks == 48)


def test_models_with_states_draft_nothing(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Neither for themselves, whose drafts would advance a sequence's state, nor for others."""
    directory = tiny_model("qwen3_5", **DELTA_NET)[0]
    with pytest.raises(SpecError, match=r"^speculation\.method: Qwen3_5ForCausalLM has states"):
        OwnLayers(make_runner(directory), BlockManager(8), before_writing=lambda: None)
    with pytest.raises(SpecError, match=r"^speculation\.model: Qwen3_5ForCausalLM has states"):
        DraftModel.open(EngineConfig(model_dir=directory), vocab_size=VOCAB_SIZE, num_tokens=64)


def test_same_model_is_right_at_any_temperature(runner: ModelRunner, model_dir: Path, make_runner: MakeRunner) -> None:
    samplings = [
        Sampling(temperature=0.0, max_tokens=29),
        Sampling(temperature=0.7, seed=1, max_tokens=29),
        Sampling(temperature=1.0, seed=2, top_p=0.9, top_k=20, min_p=0.01, max_tokens=29),
    ]
    ask = [Asked(prompt, one) for prompt, one in zip(prompts(11, 12, 30), samplings, strict=True)]
    expected = answers(runner, ask)
    draft = DraftModel(make_runner(model_dir), vocab_size=VOCAB_SIZE)
    clock = partial(next, count(step=1e-3))
    speculation = Speculation({}, models={"draft": draft}, max_tokens=6, vocab_size=VOCAB_SIZE, clock=clock)
    found = answers(runner, ask, speculation=speculation)
    compare(found, expected)
    counts = speculation.counts["draft"]
    assert found.num_steps <= 1 + 4 + 1, "only the first call may be a trial"
    assert counts.accepted == counts.drafted and counts.accepted.total() > 60
    assert draft.tables.blocks.num_available == draft.tables.blocks.num_blocks, (
        "finished sequences must not keep blocks"
    )


def test_cancelled_requests_keep_no_draft_state(
    runner: ModelRunner, model_dir: Path, make_runner: MakeRunner, asked: list[Asked]
) -> None:
    expected = answers(runner, asked)
    draft = DraftModel(make_runner(first_layers(model_dir, 2), num_blocks=256), vocab_size=VOCAB_SIZE)
    speculation = Speculation({}, models={"draft": draft}, max_tokens=6, vocab_size=VOCAB_SIZE)
    draft_blocks = draft.tables.blocks
    check_with_leavers(
        runner, asked, expected, speculation, blocks=BlockManager(200), after_step=draft_blocks.check_integrity
    )
    assert draft_blocks.num_available == draft_blocks.num_blocks and not len(draft.tables)


def test_own_layers_save_free_blocks_before_writing(runner: ModelRunner) -> None:
    """The old content of a free block is saved first."""
    blocks = BlockManager(runner.pool.num_blocks)
    ready: list[int] = []
    own = OwnLayers(runner, blocks, before_writing=lambda: ready.append(blocks.num_available))
    sequence = sequence_of(Asked(prompts(15)[0], Sampling(temperature=0.0)), "0", block_size=8)
    found, _ = blocks.allocate([], 2) or ([], 0)
    sequence.start_with(found, 0)
    sequence.computed(14, blocks)
    before = [codes.clone() for codes in runner.pool.codes]
    (proposal,) = own.propose([sequence], 6)
    assert len(proposal.tokens) == 6 and ready == [blocks.num_blocks - 2 - 1]
    assert blocks.num_available == blocks.num_blocks - 2
    written = [bool((codes != past).any()) for codes, past in zip(runner.pool.codes, before, strict=True)]
    assert written == [True, False, True], "the skipped layer must not be written"
    assert own.num_behind(sequence) == 1
    sequence.tokens.append(5)
    assert own.num_behind(sequence) is None, "expected None with two tokens missing"


_CONFIG = SchedulerConfig(max_batch_tokens=48, max_running=24, max_waiting=8)
_ASKED = [
    Asked(prompt, Sampling(temperature=temperature, seed=1, max_tokens=25))
    for prompt, temperature in zip(prompts(11, 40, 25), (0.0, 0.0, 1.0), strict=True)
]
_NUM_BLOCKS = 64
# Of three sequences with windows of 9 or 16 tokens, and of a step.
_NUM_PARTS = 1 + 3 * 4 + 6


def _recording(method: str, runner: ModelRunner, made: list[Recorded]) -> Callable[[BlockManager], Speculation]:
    def speculation(blocks: BlockManager) -> Speculation:
        def flush() -> None:
            if blocks.windows:
                runner.execute(None, Orders(parts=blocks.windows.take_changes()))

        models = OwnLayers(runner, blocks, before_writing=flush) if method == "self" else HeadProposer(runner)
        made.append(Recorded(models))
        return Speculation({method: made[-1]}, max_tokens=6, vocab_size=VOCAB_SIZE, backs_off=False)

    return speculation


@pytest.mark.parametrize(
    ("method", "family", "dtype", "is_async"),
    [
        ("self", "mistral", "float32", False),
        ("eagle1", "gpt_oss", "bfloat16", True),
        pytest.param("eagle", "gpt_oss", "bfloat16", False, marks=pytest.mark.slow),
        pytest.param("self", "gemma3", "float32", True, marks=pytest.mark.slow),
        pytest.param("eagle", "mistral", "float32", False, marks=pytest.mark.slow),
    ],
)
def test_drafts_see_their_windows(
    method: str, family: str, dtype: str, is_async: bool, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    model_dir, _ = tiny_model(family, **FAMILIES[family])
    {"self": id, "eagle": write_eagle, "eagle1": write_eagle1}[method](tmp_path)
    options = {"dtype": dtype, "heads": None if method == "self" else HeadsPlace("eagle", tmp_path)}
    whole = make_runner(model_dir, num_blocks=_NUM_BLOCKS, **options)
    freed = make_runner(model_dir, num_blocks=_NUM_BLOCKS, frees_windows=True, num_window_parts=_NUM_PARTS, **options)
    expected, made = answers(whole, _ASKED, _CONFIG, _NUM_BLOCKS), list[Recorded]()
    answers(whole, _ASKED, _CONFIG, _NUM_BLOCKS, speculation=_recording(method, whole, made))
    found = answers(freed, _ASKED, _CONFIG, _NUM_BLOCKS, is_async=is_async, speculation=_recording(method, freed, made))
    compare(found, expected)
    wanted, drafts = (recorded.drafts for recorded in made)
    both = wanted.keys() & drafts.keys()
    assert len(both) > 10 and [drafts[tokens] for tokens in both] == [wanted[tokens] for tokens in both]
