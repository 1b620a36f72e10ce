"""Draft heads: drafts equal the papers' references in any situation, and answers do not change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.model import config as model_config
from core.model.draft_heads import HeadsPlace, load_heads
from core.types.errors import SpecError
from core.types.request import Sampling
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.engine import SchedulerConfig
from engine.runner.decode_graphs import Capture
from engine.runner.runner import ModelRunner
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.draft_model import HeadProposer
from engine.spec_decode.draft_models.draft_sampler import DraftSampler
from engine.spec_decode.heads.head_row import HeadRow
from engine.spec_decode.proposer import Proposal
from engine.spec_decode.speculation import Speculation
from tests.engine.drafting import WRITERS, heads_place
from tests.engine.engine_requests import AnswerText, Asked, answers
from tests.engine.fake_capture import FakeReplays
from tests.engine.spec_decode.heads.eagle1_files import eagle1_reference, write_eagle1
from tests.engine.spec_decode.heads.head_files import (
    Choice,
    eagle_reference,
    medusa_reference,
    write_eagle,
    write_medusa,
)
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.spec_decode.proposers import Recorded, draft_logits, likeliest_draft
from tests.engine.steps import VOCAB_SIZE, needs_compiler, prompts
from tests.engine.tiny_models import GLM_MOE_DSA, MakeModel, MakeRunner, tiny_config
from tests.support.grids import quick

pytestmark = pytest.mark.usefixtures("one_thread")

_NUM_TOKENS = 4
_MTP_FAMILIES = {"": "deepseek_v3", "V3.2": "deepseek_v32", "GLM": "glm4_moe", "Qwen": "qwen3_5"}
_MTP_FAMILIES |= {"Nemotron": "nemotron_h"}
_SMALL = SchedulerConfig(max_batch_tokens=48, max_running=24, max_waiting=32)

_of_eagle = partial(eagle_reference, num_tokens=_NUM_TOKENS, layers=(0, 1, 2))
_of_eagle1 = partial(eagle1_reference, num_tokens=_NUM_TOKENS)


class Case:
    """Model, its heads, and their reference."""

    def __init__(self, runner: ModelRunner, reference: Callable[..., list[int]], *, every: int = 1) -> None:
        """every: check one of this many drafts."""
        self.runner, self.reference, self.every = runner, reference, every


@pytest.fixture(
    params=["medusa", "eagle", "eagle1", "mtp", "mtp of V3.2", "mtp of GLM", "mtp of Qwen", "mtp of Nemotron"]
)
def case(request: pytest.FixtureRequest, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path) -> Case:
    return _case(request.param, tiny_model, make_runner, tmp_path)


def _case(kind: str, tiny_model: MakeModel, make_runner: MakeRunner, directory: Path, **config: Any) -> Case:
    if kind.startswith("mtp"):
        kind, _, family = kind.partition(" of ")
        mtp = write_mtp(directory, family=_MTP_FAMILIES[family])
        model_dir, reference = directory, partial(mtp.reference, num_tokens=_NUM_TOKENS)
    else:
        model_dir, model = tiny_model("llama")
        of_kind: Any = {"medusa": medusa_reference, "eagle": _of_eagle, "eagle1": _of_eagle1}[kind]
        reference = partial(of_kind, model, WRITERS[kind](directory))
    runner = make_runner(model_dir, **({"num_blocks": 512} | config), heads=heads_place(kind, directory))
    return Case(runner, reference, every=3 if kind in ("eagle1", "mtp") else 1)


class Checked:
    """Proposer that drafts with heads for every row of every step, and compares with the reference."""

    def __init__(self, case: Case) -> None:
        self._case, self._heads = case, HeadProposer(case.runner, DraftSampler(learns=False))
        self.num_checked = 0
        self.num_empty = 0

    def propose(self, sequences: Any, max_tokens: int) -> Any:
        proposals = self._heads.propose(sequences, _NUM_TOKENS)
        for sequence, proposal in zip(sequences, proposals, strict=True):
            if proposal.tokens:
                self.num_checked += 1
                if self.num_checked % self._case.every:
                    continue
                assert list(proposal.tokens) == self._case.reference(list(sequence.tokens), choose=_drawn(sequence))
            else:
                self.num_empty += 1
        return proposals

    def finished(self, sequence: Sequence) -> None:
        pass


class SeldomChecked(Checked):
    """Check the heads in one step of seven; propose rarely right tokens in the others."""

    num_looks = 0

    def propose(self, sequences: Any, max_tokens: int) -> Any:
        self.num_looks += 1
        if self.num_looks % 7 == 0:
            return super().propose(sequences, max_tokens)
        return [Proposal([(one.tokens[-1] + 1) % VOCAB_SIZE] * 3, [0] * 3) for one in sequences]


class RestingChecked(Checked):
    """Let the heads rest in two of three periods, without collecting state in one of these.

    Check rows with state in one step of seven, or of 49. Proposals are rarely right.
    """

    num_looks = 0
    num_unknown = 0

    def propose(self, sequences: Any, max_tokens: int) -> Any:
        if self.num_looks % 20 == 0:
            self._heads.rest((None, 20, 0)[self.num_looks % 60 // 20])
        self.num_looks += 1
        found = {one: Proposal([(one.tokens[-1] + 1) % VOCAB_SIZE] * 3, [0] * 3) for one in sequences}
        known = [one for one in sequences if self._heads.num_behind(one) is not None]
        self.num_unknown += len(found) - len(known)
        if self.num_looks % 7 == 0:
            asked = [one for one in known if one.request.num_prompt_tokens % 2 or self.num_looks % 49 == 0]
            found |= zip(asked, super().propose(asked, max_tokens), strict=True)
        return list(found.values())


def _drawn(sequence: Sequence) -> Choice:
    """Sample like the sequence's own tokens."""

    def choose(logits_V: torch.Tensor, place: int) -> int:
        (drawn,) = DraftSampler().draw(logits_V[None], [sequence], place)
        assert drawn
        return drawn[0]

    return choose


@pytest.fixture
def asked() -> list[Asked]:
    every = prompts(3, 21, 9, 40, 33, 17)
    samplings = [Sampling(max_tokens=20 + i, temperature=0.8 * (i % 2), seed=i) for i in range(len(every))]
    return [
        Asked(prompt, sampling, num_choices=1 + i % 2)
        for i, (prompt, sampling) in enumerate(zip(every, samplings, strict=True))
    ]


@pytest.mark.parametrize(
    ("case", "num_blocks"),
    [
        *((kind, 30) for kind in ("medusa", "eagle", "eagle1", "mtp")),
        *quick(
            [
                *((kind, 512) for kind in ("medusa", "eagle", "eagle1", "mtp")),
                *((kind, 30) for kind in ("mtp of Qwen", "mtp of V3.2", "mtp of Nemotron")),
            ],
            (),
        ),
    ],
    indirect=["case"],
)
def test_drafts_equal_reference_and_do_not_change_answers(case: Case, asked: list[Asked], num_blocks: int) -> None:
    """With chunked prompts, choices that fork inside a block, rejected drafts at the ends of blocks, and preemption."""
    expected = answers(case.runner, asked)
    checked = Checked(case)
    speculation = Speculation({"heads": checked}, max_tokens=_NUM_TOKENS, vocab_size=VOCAB_SIZE)
    found = answers(case.runner, asked, _SMALL, num_blocks, speculation=speculation)
    assert found.ids == expected.ids
    assert bool(found.num_preemptions) == (num_blocks == 30)
    assert checked.num_checked > 100 and not checked.num_empty


@pytest.mark.parametrize(("case", "num_blocks"), [("eagle", 512), ("eagle", 30), ("mtp", 30)], indirect=["case"])
def test_deferred_entries_are_written_before_drafting(case: Case, asked: list[Asked], num_blocks: int) -> None:
    """With entries of several steps, rejected drafts among them; with forks, and blocks freed by other sequences."""
    expected = answers(case.runner, asked)
    checked = SeldomChecked(case)
    speculation = Speculation({"heads": checked}, max_tokens=_NUM_TOKENS, vocab_size=VOCAB_SIZE)
    found = answers(case.runner, asked, _SMALL, num_blocks, speculation=speculation)
    assert found.ids == expected.ids
    assert checked.num_checked > 10 and not checked.num_empty


@pytest.mark.parametrize(
    ("case", "num_blocks"), [("eagle", 30), *quick([("eagle", 512), ("mtp", 30)], ())], indirect=["case"]
)
def test_resting_heads_draft_correctly_or_not_at_all(case: Case, asked: list[Asked], num_blocks: int) -> None:
    """Whatever was passed over, and whatever the blocks' previous owners were."""
    checked = RestingChecked(case)
    speculation = Speculation({"heads": checked}, max_tokens=_NUM_TOKENS, vocab_size=VOCAB_SIZE)
    longer = [replace(one, sampling=replace(one.sampling, max_tokens=70)) for one in asked]
    expected = answers(case.runner, longer)
    found = answers(case.runner, longer, _SMALL, num_blocks + 30, speculation=speculation)
    assert found.ids == expected.ids
    assert checked.num_checked > 10 and checked.num_unknown > 10 and not checked.num_empty


@needs_compiler
@pytest.mark.parametrize("kind", ["eagle", "eagle1", "mtp"])
def test_cpu_kernels_draft_like_torch(
    kind: str, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """Entries of prompts and answers, compiled and layer by layer: the head's layer of the pool is equal up to
    rounding."""
    directory = tmp_path if kind == "mtp" else tiny_model("llama")[0]
    if kind == "mtp":  # with every expert chosen, because rounding may change the choice of close ones
        write_mtp(tmp_path, num_experts_per_tok=8, topk_group=4)
    else:
        WRITERS[kind](tmp_path)
    heads = {"heads": heads_place(kind, tmp_path), "num_blocks": 12}
    compiled, exact = make_runner(directory, dtype="bfloat16", **heads), make_runner(directory, **heads)
    tokens = prompts(30)[0]
    for start, end in ((0, 13), (13, 29), (29, 30)):
        batch = Batch.of([Row(tokens[start:end], start, [3, 5, 7, 9], num_logits=1)], block_size=8)
        for runner in (compiled, exact):
            runner.forward(batch)
            runner.settle()
    blocks = torch.tensor([3, 5, 7, 9])
    for layer in range(4):
        ours, theirs = (runner.pool.read(layer, blocks, torch.float32)[:, :, :30] for runner in (compiled, exact))
        assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean(), layer  # the head has int8 weights
    compiled_logits, exact_logits = (
        draft_logits(runner, [HeadRow(7, 30, [3, 5, 7, 9])], 3) for runner in (compiled, exact)
    )
    for ours, theirs in zip(compiled_logits, exact_logits, strict=True):
        assert (ours - theirs).abs().mean() < 0.1 * theirs.abs().mean()


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("eagle", {"num_key_value_heads": 4}, "wrong shape: midlayer.self_attn.k_proj.weight"),
        ("eagle", {"head_dim": 8}, "midlayer.self_attn.v_proj.weight is (16, 96), not (8, 96)"),
        ("eagle", {"head_dim": 6}, "head_dim is 6, and must be a multiple of 4"),
        ("eagle", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not EAGLE-3"),
        ("eagle", {"num_hidden_layers": 2}, "heads of 2 layers are not supported"),
        ("eagle", {"draft_vocab_size": 41}, "wrong shape: lm_head.weight"),
        ("eagle", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "must be three different ones"),
        ("eagle1", {"num_attention_heads": 2}, "wrong shape: layers.0.self_attn.q_proj.weight"),
        ("eagle1", {"num_key_value_heads": 4}, "wrong shape: layers.0.self_attn.k_proj.weight"),
        ("eagle1", {"architectures": ["LlamaForCausalLMEagle3"]}, "missing: midlayer."),
        ("eagle1", {"num_hidden_layers": 2}, "heads of 2 layers are not supported"),
        ("mtp", {"num_nextn_predict_layers": 0}, "DeepseekV3ForCausalLM has none; choose another"),
        ("mtp", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 is not supported; supported: 1"),
        ("medusa", {"medusa_num_heads": 5}, "missing: 4.0.linear.weight"),
        ("medusa", {"hidden_size": 64}, "hidden_size is 64, and the model's is 48"),
        ("eagle", {"hidden_size": None}, "config.json"),
        ("eagle", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, and must be a number above 0"),
        ("eagle", {"rope_theta": -1.0}, "rope_theta is -1.0, and must be a number above 0"),
        ("eagle", {"intermediate_size": -80}, "intermediate_size is -80, and must be a whole number from 1"),
        ("eagle", {"num_attention_heads": 4.0}, "num_attention_heads is 4.0, and must be a whole number from 1"),
        ("eagle", {"draft_vocab_size": "40"}, "draft_vocab_size is '40', and must be from 1 to"),
        ("eagle", {"architectures": 5}, "config.json"),
        ("eagle", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a", 1, 2]}}, "config.json"),
        ("eagle", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0.5, 1, 2]}}, "must be three different ones"),
        ("medusa", {"medusa_num_heads": None}, "medusa_num_heads is None, and must be a number from 1 to 64"),
        ("medusa", {"medusa_num_heads": 10**9}, "medusa_num_heads is 1000000000, and must be a number"),
        ("medusa", {"medusa_num_layers": 10**9}, "medusa_num_layers is 1000000000, and must be a number from 0"),
    ],
)
def test_unsupported_heads_are_rejected(
    kind: str, changes: dict[str, Any], complaint: str, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    WRITERS[kind](tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    model_dir = tmp_path if kind == "mtp" else tiny_model("llama")[0]
    with pytest.raises(SpecError) as rejected:
        make_runner(model_dir, heads=heads_place(kind, tmp_path))
    assert complaint in str(rejected.value) and "\n" not in str(rejected.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("d2t", torch.zeros(5, dtype=torch.int64)),
        ("d2t", torch.zeros(0, dtype=torch.int64)),
        ("embed_tokens.weight", torch.zeros(VOCAB_SIZE - 1, 48)),
        ("embed_tokens.weight", torch.zeros(VOCAB_SIZE, 47)),
    ],
)
def test_optional_tensors_must_have_the_right_shape(
    name: str, tensor: torch.Tensor, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """Otherwise the first step would fail, and with it the replica."""
    tensors = write_eagle(tmp_path, draft_vocab_size=VOCAB_SIZE)
    whole = {"lm_head.weight": torch.zeros(VOCAB_SIZE, 48), "d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64)}
    save_file(tensors | whole | {name: tensor}, tmp_path / "model.safetensors")
    with pytest.raises(SpecError, match=f"wrong shape: {name}"):
        make_runner(tiny_model("llama")[0], heads=HeadsPlace("eagle", tmp_path))


@pytest.mark.parametrize(
    ("write", "reference", "options"),
    [
        (write_eagle1, _of_eagle1, {"has_biases": False, "has_copies": True}),
        (write_eagle1, _of_eagle1, {"has_biases": True, "has_copies": False}),
        *((write_medusa, medusa_reference, {"is_old": is_old, "num_residuals": 1}) for is_old in (True, False)),
    ],
)
def test_optional_parts_and_both_naming_schemes_are_read(
    write: Any, reference: Any, options: dict[str, Any], tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    directory, model = tiny_model("llama")
    tensors, tokens = write(tmp_path, **options), prompts(12)[0]
    runner = make_runner(directory, heads=HeadsPlace("eagle" if write is write_eagle1 else "medusa", tmp_path))
    runner.forward(Batch.of([Row(tokens[:-1], 0, [0, 1], num_logits=1)], block_size=8))
    found = likeliest_draft(runner, HeadRow(tokens[-1], len(tokens) - 1, [0, 1]), _NUM_TOKENS)
    assert found == reference(model, tensors, tokens)


def test_received_kv_without_features_delays_drafting_one_step(case: Case) -> None:
    runner, tokens = case.runner, prompts(12)[0]
    assert runner.heads
    runner.forward(Batch.of([Row(tokens[:-1], 0, [0, 1], num_logits=1)], block_size=8))
    features, row = runner.heads.features.of([0, 1], 11), HeadRow(tokens[-1], 11, [4, 5])
    assert len(features) == 48 * 4 and not runner.heads.knows([row])
    runner.heads.features.arrived([4, 5], 0, 11, b"")
    assert not runner.heads.knows([row]) and runner.heads.features.of([4, 5], 11) == b""
    runner.heads.features.arrived([4, 5], 0, 11, features)
    assert runner.heads.knows([row]) and runner.heads.features.of([4, 5], 11) == features
    runner.heads.features.arrived([4, 5], 0, 11, b"")
    runner.heads.features.arrived([4, 5], 11, 11, features)
    assert runner.heads.knows([row]), "features must be accepted without further KV"
    runner.heads.features.arrived([4, 5], 0, 11, features + b"1")
    assert not runner.heads.knows([row]), "features of a wrong size must be rejected"
    runner.forward(Batch.of([Row(tokens[:-1], 0, [4, 5], num_logits=1)], block_size=8))
    assert runner.heads.knows([row])
    runner.heads.features.arrived([4, 5], 11, 11, b"")
    assert not runner.heads.knows([row]), "old features belong to the previous owner of the blocks"


def test_features_received_after_warm_up_are_kept(
    tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """A GPU warms heads up and attaches them in inference mode; KV arrives outside of it."""
    write_medusa(tmp_path)
    runner = make_runner(tiny_model("llama")[0], heads=HeadsPlace("medusa", tmp_path))
    heads = runner.heads
    assert heads
    with torch.inference_mode():
        heads.attach(runner.pool)
    heads.features.arrived([4, 5], 0, 11, b"1" * 48 * 4)
    assert heads.knows([HeadRow(0, 11, [4, 5])])


def test_layout_fingerprint_includes_heads_with_kv(tiny_model: MakeModel, tmp_path: Path) -> None:
    directory, _ = tiny_model("llama")
    write_eagle(tmp_path / "one")
    write_eagle(tmp_path / "two", own_embedding=True)
    write_medusa(tmp_path / "medusa")
    plain = EngineConfig(model_dir=directory, dtype="float32").layout()
    one, two, medusa = (
        EngineConfig(model_dir=directory, dtype="float32", heads=HeadsPlace(kind, tmp_path / name)).layout()
        for kind, name in (("eagle", "one"), ("eagle", "two"), ("medusa", "medusa"))
    )
    assert len({plain.fingerprint, one.fingerprint, two.fingerprint}) == 3
    assert medusa.fingerprint == plain.fingerprint, "Medusa keeps no KV"
    assert one.num_layers == plain.num_layers + 1
    assert one.block_bytes == one.block_size * one.bytes_per_token() + 48 * 4


_NUM_RECORDED, _MOST_ROWS = 3, 24
# On a CPU experts are called one by one.
_PLAIN_WRITERS = {**WRITERS, "mtp": lambda directory: write_mtp(directory, first_k_dense_replace=4)}


@pytest.mark.parametrize("kind", _PLAIN_WRITERS)
def test_drafts_after_replayed_steps(kind: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    """With prompts, answers, verified drafts, and forks; all steps but the longest prompts are replayed."""
    capture = FakeReplays()
    plain, expected = _answers(kind, tiny_model, tmp_path)
    replayed, guesses = _answers(kind, tiny_model, tmp_path, capture=capture, recorded_rows=_MOST_ROWS)
    assert replayed.ids == plain.ids and guesses == expected
    assert capture.num_replays >= replayed.num_steps - 2 > 10
    assert sum(map(len, guesses.values())) > 100


@pytest.mark.gpu
@pytest.mark.parametrize("kind", _PLAIN_WRITERS)
def test_drafts_on_a_gpu(kind: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    plain, expected = _answers(kind, tiny_model, tmp_path)
    for recorded_rows in (0, _MOST_ROWS):
        outputs, guesses = _answers(kind, tiny_model, tmp_path, recorded_rows=recorded_rows, device="cuda")
        assert outputs.ids == plain.ids and guesses == expected, f"{recorded_rows} rows recorded"


def _answers(
    kind: str, tiny_model: MakeModel, directory: Path, *, capture: Capture | None = None, **config: Any
) -> tuple[AnswerText, dict[tuple[int, ...], list[int]]]:
    """Return the answers, and all drafts. directory: for the files of the heads."""
    _PLAIN_WRITERS[kind](directory)
    heads = heads_place(kind, directory)
    model_dir = directory if kind == "mtp" else tiny_model("llama")[0]
    runner = ModelRunner(
        EngineConfig(model_dir=model_dir, dtype="float32", block_size=8, num_blocks=256, heads=heads, **config),
        capture=capture,
    )
    recorder = Recorded(HeadProposer(runner, DraftSampler(learns=False)), _NUM_RECORDED)
    asked = [
        Asked(prompt, Sampling(max_tokens=14 + i, temperature=0.7 * (i % 2), seed=i), num_choices=1 + i % 2)
        for i, prompt in enumerate(prompts(3, 40, 9, 17))
    ]
    speculation = Speculation({"heads": recorder}, max_tokens=_NUM_RECORDED, vocab_size=VOCAB_SIZE)
    return answers(runner, asked, num_blocks=256, speculation=speculation), recorder.drafts


@pytest.mark.parametrize("family", ["deepseek_v32", "nemotron_h"])
def test_logits_behind_a_prompt_equal_the_reference(family: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    """With an indexer, which chooses 7 of the positions, draft included; with experts in a layer of their own."""
    mtp, (tokens,) = write_mtp(tmp_path, family=family), prompts(23)
    runner, expected = make_runner(tmp_path, heads=HeadsPlace("mtp", tmp_path)), list[Tensor]()
    prompt = Row(tokens[:-1], start=0, blocks=[3, 1, 2], num_logits=1, state_index=0)
    runner.forward(Batch.of([prompt], block_size=8))

    def choose_same(logits_V: Tensor, place: int) -> int:
        expected.append(logits_V)
        return 11 + place

    mtp.reference(tokens, 3, choose=choose_same)
    found = draft_logits(runner, [HeadRow(tokens[-1], 22, [3, 1, 2])], 3)
    torch.testing.assert_close(torch.cat(found), torch.stack(expected), atol=2e-3, rtol=1e-3)


def test_mtp_layer_chooses_positions_if_the_layer_before_shares_them(tmp_path: Path) -> None:
    tiny_config("glm_moe_dsa", **GLM_MOE_DSA, num_nextn_predict_layers=1).save_pretrained(tmp_path)
    model = model_config.load(tmp_path)
    shape = load_heads("mtp", tmp_path, model).shape
    assert not model.layers[-1].has_indexer and shape is not None and shape.layers[-1].has_indexer
    assert shape.kv_layers[-1][1] == model.kv_dim + GLM_MOE_DSA["index_head_dim"]


def test_model_without_mtp_layer_is_rejected(tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path) -> None:
    write_mtp(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.3.enorm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    for directory, complaint in (
        (tiny_model("llama")[0], "LlamaForCausalLM has none"),
        (tmp_path, "missing: model.layers.3.enorm.weight"),
    ):
        with pytest.raises(SpecError) as rejected:
            make_runner(directory, heads=HeadsPlace("mtp", directory))
        assert complaint in str(rejected.value) and "\n" not in str(rejected.value)
