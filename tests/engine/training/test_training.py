"""Heads learn from a model's answers; whatever interrupts a run, it ends as if nothing had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.model.draft_heads import HeadsPlace
from core.types.errors import SpecError
from core.types.request import Sampling
from engine.runner.runner import ModelRunner
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.head_proposer import HeadProposer
from engine.spec_decode.speculation import Speculation
from engine.training.answers import FileAsker
from engine.training.eagle import EagleLearner
from engine.training.learner import Learner
from engine.training.medusa import MedusaLearner
from engine.training.prompts import Conversation
from engine.training.run import Kind, Run, RunWords
from engine.training.teacher import Teacher
from engine.training.training import train
from engine.training.vocabulary import DraftVocabulary
from tests.engine.asked import Asked, answers
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeRunner, random_model, tiny_config

_PASSES = 6
_NUM_PROMPTS = 144

_Whole = dict[Kind, tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What it says next follows mostly from the last token, as a head can learn in seconds."""
    directory = tmp_path_factory.mktemp("model")
    model = random_model(tiny_config("llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(100)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """Bits depend on how many threads share a product."""


def _words(kind: Kind, **changes: Any) -> RunWords:
    return RunWords(**{"kind": kind, "model": "m", "data": "d", "seed": 3, "tokens": 9999, "passes": _PASSES} | changes)


class _Told:
    """Implements TrainingProgress. Interrupts after so many advances of one kind."""

    def __init__(self, *, interrupts: str = "", after: int = 0) -> None:
        self._interrupts, self._left, self._what = interrupts, after, ""
        self.lines: list[str] = []
        self.begun: dict[str, int] = {}  # what was done before
        self.done: dict[str, int] = {}
        self.totals: dict[str, int] = {}

    def begin(self, what: str, total: int, done: int) -> None:
        self._what = what
        self.begun[what] = self.done[what] = done
        self.totals[what] = total

    def advance(self, count: int, note: str = "") -> None:
        if self._what == self._interrupts:
            self._left -= 1
            if self._left <= 0:
                raise KeyboardInterrupt
        self.done[self._what] += count

    def say(self, line: str) -> None:
        self.lines.append(line)


def _conversations() -> list[Conversation]:
    lengths = [4 + number % 9 for number in range(_NUM_PROMPTS)]
    return [Conversation(tuple(tokens), len(tokens)) for tokens in prompts(*lengths)]


def _train(directory: Path, model_dir: Path, kind: Kind, told: _Told | None = None, **more: Any) -> dict[str, Any]:
    run = Run(directory, _words(kind))
    options: dict[str, Any] = {
        "seed": 3,
        "tokens": 9999,
        "max_answer": 24,
        "passes": _PASSES,
        "step_tokens": 256,
        "rate": 1e-2,
    } | more
    return train(run, model_dir, kind, FileAsker(_conversations()), progress=told or _Told(), **options)


@pytest.fixture(scope="module")
def whole(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> _Whole:
    """Runs that nothing has interrupted."""
    torch.set_num_threads(1)
    kinds: tuple[Kind, ...] = ("eagle3", "medusa")
    directories = {kind: tmp_path_factory.mktemp("run") / kind for kind in kinds}
    return {kind: (path, _train(path, model_dir, kind)) for kind, path in directories.items()}


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_what_is_learnt_shows_on_answers_held_out(whole: _Whole, kind: Kind) -> None:
    found = whole[kind][1]["held_out"]
    assert list(found) == ["untrained", *(f"pass {number + 1}" for number in range(_PASSES))]
    last, first = found[f"pass {_PASSES}"], found["untrained"]
    assert last["loss"] < found["pass 1"]["loss"]
    assert last["mean_length"] > first["mean_length"] + 0.2
    assert last["by_place"] == sorted(last["by_place"], reverse=True)


@pytest.mark.parametrize(
    ("kind", "interrupts", "after"),
    [("eagle3", "answers", 1), ("eagle3", "features", 1), ("eagle3", "steps", 17), ("medusa", "steps", 30)],
)
def test_a_run_that_was_killed_ends_as_one_that_was_not(
    whole: _Whole, model_dir: Path, tmp_path: Path, kind: Kind, interrupts: str, after: int
) -> None:
    """Bit for bit; what was written is all that is left of a run, as when it is killed."""
    directory = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        _train(directory, model_dir, kind, _Told(interrupts=interrupts, after=after), save_every_s=0.0)
    told = _Told()
    report = _train(directory, model_dir, kind, told)
    if interrupts == "steps":
        assert told.begun["steps"] == after, "it goes on where it was"
    assert report == whole[kind][1]
    for name in ("model.safetensors", "config.json"):
        assert (directory / name).read_bytes() == (whole[kind][0] / name).read_bytes()


def test_a_run_that_is_done_stays_so(whole: _Whole, model_dir: Path) -> None:
    directory, report = whole["eagle3"]
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert _train(directory, model_dir, "eagle3") == report
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    assert not list(directory.rglob("features-*")), "they are large, and not needed any more"


def test_another_run_has_no_business_in_a_directory(whole: _Whole, tmp_path: Path) -> None:
    directory = whole["eagle3"][0]
    with pytest.raises(
        SpecError, match=r"holds another run .kind eagle3, not medusa; seed 3, not 4.*another directory"
    ):
        Run(directory, _words("medusa", seed=4))
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(SpecError, match="is there already, and no run of train-draft"):
        Run(tmp_path, _words("eagle3"))


def test_what_is_done_is_never_more_than_all(model_dir: Path, tmp_path: Path) -> None:
    """Answers are made many at a time: more than were asked for."""
    told = _Told()
    run = Run(tmp_path / "run", _words("eagle3"))
    asker = FileAsker(_conversations())
    train(run, model_dir, "eagle3", asker, seed=3, tokens=9, max_answer=4, passes=1, progress=told)
    assert told.done == told.totals


def test_too_few_answers_are_an_error(model_dir: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", _words("eagle3"))
    asker = FileAsker([Conversation((1, 2, 3), 3)])
    with pytest.raises(SpecError, match="--data: 1 answers are too few to train on some and to measure on others"):
        train(run, model_dir, "eagle3", asker, seed=0, tokens=9, max_answer=4, passes=1, progress=_Told())


def test_eagle_is_published_by_its_usual_names(whole: _Whole) -> None:
    """As yuhuili/EAGLE3-LLaMA3.1-Instruct-8B has them, and vLLM and SGLang read them."""
    directory = whole["eagle3"][0]
    tensors = load_file(directory / "model.safetensors")
    hidden, vocab = 48, VOCAB_SIZE // 64 * 64
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (64, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (32, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (32, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, 64),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (80, hidden),
        "midlayer.mlp.up_proj.weight": (80, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 80),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
        "d2t": (vocab,),
        "t2d": (VOCAB_SIZE,),
    }
    known = torch.arange(vocab) + tensors["d2t"]
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert torch.nonzero(tensors["t2d"]).squeeze(1).tolist() == known.tolist()
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (vocab, VOCAB_SIZE, 1)


def test_medusa_is_published_by_its_usual_names(whole: _Whole) -> None:
    """As FasterDecoding/medusa-vicuna-7b-v1.3 has them: every head with a projection on all of the vocabulary."""
    directory = whole["medusa"][0]
    tensors = load_file(directory / "model.safetensors")
    shapes = {"0.linear.weight": (48, 48), "0.linear.bias": (48,), "1.weight": (VOCAB_SIZE, 48)}
    expected = {f"{head}.{name}": shape for head in range(4) for name, shape in shapes.items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    config = json.loads((directory / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (4, 1)


def test_what_is_published_can_be_read_and_published_again(whole: _Whole, model_dir: Path) -> None:
    teacher = Teacher(model_dir)
    tensors = {kind: load_file(directory / "model.safetensors") for kind, (directory, _) in whole.items()}
    known = torch.nonzero(tensors["eagle3"]["t2d"]).squeeze(1)
    learners: dict[Kind, Learner] = {
        "eagle3": EagleLearner(teacher, DraftVocabulary(known, VOCAB_SIZE, 1.0), seed=9),
        "medusa": MedusaLearner(teacher, DraftVocabulary(torch.arange(VOCAB_SIZE), VOCAB_SIZE, 1.0), seed=9),
    }
    for kind, learner in learners.items():
        learner.load(tensors[kind])
        again = learner.published()[1]
        assert again.keys() == tensors[kind].keys()
        for name, tensor in again.items():
            torch.testing.assert_close(tensor, tensors[kind][name], rtol=0, atol=0)


class _Noted:
    """Implements Proposer: keeps what heads have said of each sequence, by its length then."""

    def __init__(self, runner: ModelRunner) -> None:
        self._heads = HeadProposer(runner)
        self.said: dict[tuple[Sequence, int], Any] = {}

    def propose(self, sequences: Any, max_tokens: int) -> Any:
        proposals = self._heads.propose(sequences, max_tokens)
        for sequence, proposal in zip(sequences, proposals, strict=True):
            self.said[sequence, len(sequence.tokens)] = proposal.tokens
        return proposals

    def finished(self, sequence: Sequence) -> None:
        pass

    @property
    def share(self) -> float:
        """Of the first tokens of drafts, those that came."""
        right = [
            sequence.tokens[length] == tokens[0]
            for (sequence, length), tokens in self.said.items()
            if tokens and length < len(sequence.tokens)
        ]
        return sum(right) / len(right)


@pytest.mark.parametrize(("kind", "heads"), [("eagle3", "eagle"), ("medusa", "medusa")])
def test_heads_draft_in_an_engine_as_they_were_measured(
    whole: _Whole, model_dir: Path, make_runner: MakeRunner, kind: Kind, heads: str
) -> None:
    """Loaded from what was published, asked in every step of the answers held out. bfloat16 in training, float32 here,
    and other steps: about as often, then."""
    directory, report = whole[kind]
    runner = make_runner(model_dir, heads=HeadsPlace(heads, directory), num_blocks=512)
    noted = _Noted(runner)
    held_out = [one for number, one in enumerate(_conversations()) if number % 16 == 0]
    asked = [Asked(list(one.tokens), Sampling(temperature=0.0, max_tokens=24)) for one in held_out]
    answers(runner, asked, speculation=Speculation({"heads": noted}, max_tokens=3, vocab_size=VOCAB_SIZE))
    assert len(noted.said) > 80
    assert noted.share == pytest.approx(report["held_out"][f"pass {_PASSES}"]["by_place"][0], abs=0.15)
