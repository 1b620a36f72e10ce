"""Jump-forward decoding: forced tokens are computed together, and equal those chosen one by one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

from core.grammar.compiler import CompiledGrammar, GrammarCompiler
from core.types.request import Grammar, GrammarKind, Sampling, TokenRules
from engine.engine import SchedulerConfig
from engine.runner.runner import ModelRunner
from engine.sampling.params import SamplingRow
from tests.engine.engine_requests import AMPLE, Asked, answers
from tests.engine.steps import prompts
from tests.engine.tiny_models import MakeModel, MakeRunner
from tests.support.character_tokenizer import CHARACTERS, END, save_tokenizer
from tests.support.generated_schemas import schemas

pytestmark = pytest.mark.usefixtures("one_thread")

_TEXT = "ab, and so on[0-9]: the rest is known, and more than 32 tokens of it"
_B = CHARACTERS.index("b")


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Disable forced tokens until `undo`."""
    monkeypatch.setattr(SamplingRow, "known_token", lambda row: None)
    yield monkeypatch


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    directory = tmp_path_factory.mktemp("letters")
    save_tokenizer(directory)
    return GrammarCompiler(directory, vocab_size=131)


def _compiled(compiler: GrammarCompiler, text: str, kind: GrammarKind = GrammarKind.REGEX) -> CompiledGrammar:
    return compiler.compile(Grammar(kind=kind, text=text))


@pytest.fixture
def runner(tiny_model: MakeModel, make_runner: MakeRunner) -> ModelRunner:
    return make_runner(tiny_model("llama")[0], num_blocks=512)


@pytest.mark.parametrize("count", [24, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize("vocabulary", ["characters", "smollm2"])
def test_forced_tokens_do_not_change_answers(
    vocabulary: str,
    count: int,
    letters: GrammarCompiler,
    smollm2_dir: Path,
    tmp_path: Path,
    tiny_model: MakeModel,
    make_runner: MakeRunner,
    one_by_one: pytest.MonkeyPatch,
) -> None:
    """Beside requests without a grammar, two choices each, in a pool with preemption, in small steps."""
    if vocabulary == "characters":
        directory, compiler, ends = tiny_model("llama")[0], letters, (END,)
    else:
        directory = tmp_path / "model"
        shutil.copytree(tiny_model("llama", vocab_size=49152)[0], directory)
        shutil.copy(smollm2_dir / "tokenizer.json", directory)
        compiler, ends = GrammarCompiler(directory, vocab_size=49152), (0, 2)
    # Rows do not depend on the batch, bit for bit, so the answers without a grammar are equal, too.
    runner = make_runner(directory, num_blocks=512, dtype="bfloat16", deterministic=True)
    known = [
        _compiled(compiler, json.dumps(schema), GrammarKind.JSON_SCHEMA) if number % 4 else None
        for number, schema in enumerate(schemas(count))
    ]
    asked = [
        Asked(
            prompt,
            Sampling(max_tokens=30 + i % 20, temperature=float(i % 3 > 0), seed=i, stop_token_ids=ends),
            grammar,
            num_choices=1 + i % 2,
        )
        for i, (grammar, prompt) in enumerate(zip(known, prompts(*(9 + i % 30 for i in range(count))), strict=True))
    ]
    groups = [asked[begin : begin + 8] for begin in range(0, count, 8)]
    expected = [answers(runner, group) for group in groups]
    one_by_one.undo()
    small = SchedulerConfig(max_batch_tokens=24, max_running=32, max_waiting=32)
    outputs = [answers(runner, group, small, num_blocks=40) for group in groups]
    for theirs, ours in zip(expected, outputs, strict=True):
        assert (ours.ids, ours.failures) == (theirs.ids, theirs.failures)
    assert not sum(one.num_known for one in expected)
    assert sum(one.num_known for one in outputs) > count and sum(one.num_preemptions for one in outputs)


def test_forced_tokens_take_one_step(letters: GrammarCompiler, runner: ModelRunner) -> None:
    grammar = _compiled(letters, _TEXT)
    ask = Asked(prompts(11)[0], Sampling(max_tokens=99, temperature=0.0, stop_token_ids=(END,)), grammar)
    outputs = answers(runner, [ask])
    text = "".join(CHARACTERS[token] for token in outputs.ids[0][:-1])
    assert text[14:] == ": the rest is known, and more than 32 tokens of it" and outputs.ids[0][-1] == END
    # The prompt; 12 tokens and the digit; 32 tokens, and the one after them; the rest, which ends the answer without a
    # step.
    assert (outputs.num_known, outputs.num_steps) == (len(outputs.ids[0]) - 3, 4)
    for budget in (1, 2, 5):  # tokens per step
        small = answers(runner, [ask], replace(AMPLE, max_batch_tokens=budget))
        assert small.ids == outputs.ids


@pytest.mark.parametrize("max_tokens", [1, 2, 14, 20])
@pytest.mark.parametrize("asking", ["nothing", "min_tokens", "penalties", "bad word", "allowed", "logprobs", "no end"])
def test_sampling_parameters_apply_to_forced_tokens(
    asking: str, max_tokens: int, letters: GrammarCompiler, runner: ModelRunner, one_by_one: pytest.MonkeyPatch
) -> None:
    prefix = "ab, and so on"
    rules = {
        "bad word": TokenRules(bad_words=((_B, CHARACTERS.index(",")), (CHARACTERS.index("7"),))),
        "allowed": TokenRules(allowed_token_ids=tuple(CHARACTERS.index(c) for c in "ab, 0123")),
    }
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=15 if asking == "min_tokens" else 0,
        seed=5,
        presence_penalty=1.5 if asking == "penalties" else 0.0,
        repetition_penalty=1.7 if asking == "penalties" else 1.0,
        stop_token_ids=() if asking == "no end" else (END,),
        num_logprobs=2 if asking == "logprobs" else None,
        token_rules=rules.get(asking),
    )
    asked = [
        Asked(prompt, sampling, _compiled(letters, text))
        for prompt, text in zip(prompts(7, 12), (f"{prefix}[0-9]{{1,3}}", "ab?"), strict=True)
    ]
    expected = answers(runner, asked)
    one_by_one.undo()
    found = answers(runner, asked)
    assert (found.ids, found.failures) == (expected.ids, expected.failures)
    assert bool(found.num_known) == (asking != "logprobs" and max_tokens > 1)
    for key, tokens in found.tokens.items():
        assert [t.finish_reason for t in tokens] == [t.finish_reason for t in expected.tokens[key]]
        assert len(tokens) <= max_tokens
        for ours, theirs in zip(tokens, expected.tokens[key], strict=True):
            if asking == "logprobs":
                assert ours.logprob and theirs.logprob
                assert_allclose(ours.logprob.logprob, theirs.logprob.logprob, atol=1e-4)
