"""GPU deployments: answers equal those of one process, with every request option, draft method and width of numbers.

The same on a CPU, where it is slow and says that the test is right. Other files have GPU cases of their tests.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor

from core.grammar.compiler import GrammarCompiler
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import Role, Sampling, ThinkingBudget
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.tools.offline import generate
from kvtransfer.protocol.frames import Segment
from kvtransfer.transfer.codec import codec_for, slots_of
from router.routing.policies import RoundRobin
from tests.e2e.conftest import Checkpoint, Lab, exact_tree, gib_of_blocks, on_device
from tests.engine.engine_requests import LETTERS, AnswerText, Asked, answers, compare, letters_grammar, one_of_each_kind
from tests.engine.quantized_files import write_quantised
from tests.engine.scored_prompts import ScoredPrompts
from tests.engine.spec_decode.draft_models.smaller_model import first_layers
from tests.engine.spec_decode.heads.head_files import write_eagle, write_medusa
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import DEEPSEEK_V2, random_model, tiny_config
from tests.support.character_tokenizer import CHARACTERS
from tests.support.draft_always import draft_always
from tests.support.local_cluster import LocalCluster, LocalReplica
from tests.support.waiting import WITHIN_S

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize(
        "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
    ),
]

_GREEDY = Sampling(max_tokens=40, temperature=0.0)
_SAMPLED = Sampling(max_tokens=40, temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=2)
_PROMPTS = prompts(20, 33, 47, 70)
_SAMPLINGS = [_GREEDY, replace(_SAMPLED, seed=1), _GREEDY, replace(_SAMPLED, seed=2)]
_BUDGET = ThinkingBudget(
    num_tokens=10,
    is_open=True,
    opening="<think>",
    closing="</think>",
    closing_ids=tuple(CHARACTERS.index(character) for character in "</think>"),
)
_ATOL = 1e-3  # of log-probabilities, because batch shapes differ
_NUM_TOP = 3
_MAX_RUNNING = 8
# All layers are dense, because rounding may choose other experts.
_DENSE = {"first_k_dense_replace": 3, "n_shared_experts": 0}


@dataclass(frozen=True)
class Question:
    """Requests and their reference answers of one process; every third prompt is scored, too."""

    asked: list[Asked]
    said: AnswerText
    scored: dict[int, PromptLogprobs]

    @classmethod
    def of(cls, model_dir: Path, device: str) -> Question:
        """Create the requests. Replaces the model's tokenizer, for the grammar."""
        grammar = letters_grammar(model_dir)
        thinking = GrammarCompiler(model_dir, vocab_size=VOCAB_SIZE).bounded(_BUDGET, None)
        asked = [one for one in one_of_each_kind(grammar) if one.thinking is None]
        asked.append(Asked(prompts(40)[0], Sampling(max_tokens=30, temperature=1.0, seed=9), thinking=thinking))
        runner = ModelRunner(EngineConfig(model_dir=model_dir, dtype="float32", kv_memory_gib=0.1, device=device))
        scored = range(0, len(asked), 3)
        scores = ScoredPrompts(runner, max_batch_tokens=512).tell([(asked[i].prompt, _NUM_TOP) for i in scored])
        return cls(asked, answers(runner, asked), dict(zip(scored, scores, strict=True)))

    async def check(self, cluster: LocalCluster) -> None:
        """Send all requests concurrently and check the answers."""
        running = [
            cluster.generate(
                one.prompt,
                one.sampling,
                id=str(i),
                n=one.num_choices,
                grammar=LETTERS if one.grammar else None,
                thinking=_BUDGET if one.thinking else None,
                num_prompt_logprobs=_NUM_TOP if i in self.scored else None,
            )
            for i, one in enumerate(self.asked)
        ]
        async with asyncio.timeout(WITHIN_S):
            found = await asyncio.gather(*running)
        tokens = {(str(i), choice): some for i, one in enumerate(found) for choice, some in one.tokens.items()}
        compare(AnswerText(tokens), self.said, atol=_ATOL)
        for i, answer in enumerate(found):
            _compare_prompts(answer.prompt_logprobs, self.scored.get(i))


def _compare_prompts(found: PromptLogprobs | None, expected: PromptLogprobs | None) -> None:
    assert (found is None) == (expected is None)
    if found and expected:
        assert_array_equal(found.ranks_P, expected.ranks_P)
        assert_array_equal(found.top_ids_PK, expected.top_ids_PK)
        assert_allclose(found.logprobs_P, expected.logprobs_P, atol=_ATOL)
        assert_allclose(found.top_logprobs_PK, expected.top_logprobs_PK, atol=_ATOL)


@pytest.fixture
def model_dir(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def _tree(device: str, decode: int = 1, *, tp: int = 1, **sizes: Any) -> dict[str, Any]:
    """sizes: of the decode pool. max_running bounds the rows and drafted tokens with logits."""
    tree = on_device(device, exact_tree(1, decode, tp=(tp, tp)))
    tree["decode"] |= {"max_running": 32} | sizes
    return tree


@pytest.mark.parametrize("tp", [1, 2])
async def test_all_request_options(lab: Lab, model_dir: Path, tp: int, device: str) -> None:
    question = Question.of(model_dir, device)
    async with lab.own(model_dir, processes=True, **_tree(device, tp=tp)) as cluster:
        await question.check(cluster)
        await cluster.until(lambda: cluster.totals(Role.DECODE).forced_tokens)


async def test_all_request_options_with_drafts(lab: Lab, model_dir: Path, device: str) -> None:
    question, tree = Question.of(model_dir, device), _tree(device, 0)
    tree["speculation"] = {"method": "suffix", "max_tokens": 3}
    async with lab.own(model_dir, processes=True, policy=RoundRobin(), **tree) as cluster:
        decode = await cluster.add(Role.DECODE, prepare=draft_always)
        for _ in range(2):  # the second time, drafts use the first answers
            await question.check(cluster)
        await cluster.until(lambda: _num_drafted(cluster, decode)[1] > 100)


async def test_all_request_options_with_preemption(lab: Lab, model_dir: Path, device: str) -> None:
    """The pool has 20 blocks, and the router expects answers of one token."""
    question, tree = Question.of(model_dir, device), _tree(device, kv_memory_gib=gib_of_blocks(20))
    async with lab.own(model_dir, processes=True, **tree) as cluster:
        cluster.core.reservations.finished([1] * 200)
        await question.check(cluster)
        await cluster.until(lambda: cluster.totals(Role.DECODE).preemptions)


@pytest.mark.parametrize("method", ["suffix", "draft", "self", "medusa", "eagle", "mtp"])
async def test_drafts(lab: Lab, tmp_path: Path, method: str, device: str) -> None:
    model_dir, drafts = _drafting(method, lab.checkpoint("llama"), tmp_path)
    tree = _tree(device, 0, max_running=16)
    tree["speculation"] = {"method": method, "model": str(drafts) if drafts else None, "max_tokens": 3}
    expected = lab.reference.ids(model_dir, _PROMPTS, _SAMPLINGS, device=device)
    async with lab.own(model_dir, processes=True, policy=RoundRobin(), **tree) as cluster:
        adding = cluster.add(Role.DECODE), cluster.add(Role.DECODE, prepare=draft_always)
        as_it_pays, always = await asyncio.gather(*adding)
        for _ in range(4):  # twice per replica, so that drafts use the first answers
            found = await cluster.generate_all(_PROMPTS, _SAMPLINGS)
            assert [answer.ids for answer in found] == expected
        await cluster.until(lambda: _num_drafted(cluster, as_it_pays)[0])
        await cluster.until(lambda: _num_drafted(cluster, always)[0] > 100)


def _drafting(method: str, llama: Path, directory: Path) -> tuple[Path, Path | None]:
    """Return the served model and the draft source for it."""
    match method:
        case "draft":
            return llama, first_layers(llama, 2)
        case "medusa":
            write_medusa(directory)
        case "eagle":
            write_eagle(directory)
        case "mtp":
            write_mtp(directory)
            shutil.copy(llama / "tokenizer.json", directory)
            return directory, None
        case _:
            return llama, None
    return llama, directory


def _num_drafted(cluster: LocalCluster, replica: LocalReplica) -> tuple[int, int]:
    """Return the numbers of drafted and of accepted tokens."""
    drafted = cluster.seen(replica).status.totals.drafted
    return sum(sum(one.tokens) for one in drafted), sum(sum(one.accepted) for one in drafted)


@pytest.mark.parametrize("stored", ["fp8 blocks", "gptq", "int8 channels", "int8"])
async def test_quantized_weights(lab: Lab, tmp_path: Path, stored: str, device: str) -> None:
    model_dir, weights = lab.checkpoint("llama"), "int8"  # quantized at load
    if stored != "int8":
        write_quantised(tmp_path, random_model(tiny_config("llama")), stored)
        shutil.copy(model_dir / "tokenizer.json", tmp_path)
        model_dir, weights = tmp_path, "auto"
    expected = _one_by_one(lab, model_dir, **_engine(device), weights=weights)
    assert await _answers(lab, model_dir, _rounding_tree(device, weights=weights)) == expected


@pytest.mark.parametrize("pool_dtype", ["fp8_e4m3", "int8"])
async def test_8_bit_pools(lab: Lab, pool_dtype: str, device: str) -> None:
    model_dir = lab.checkpoint("llama")
    expected = _one_by_one(lab, model_dir, **_engine(device), pool_dtype=pool_dtype)
    assert await _answers(lab, model_dir, _rounding_tree(device, wire_dtype="raw", pool_dtype=pool_dtype)) == expected


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("deepseek_v2", DEEPSEEK_V2 | _DENSE)], ids=["heads", "latents"]
)
async def test_8_bit_wire(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], device: str
) -> None:
    """Answers equal those of one process whose pool passes a prompt's KV through the wire's codec."""
    model_dir = lab.checkpoint(family, **changes)
    runner = ModelRunner(EngineConfig(model_dir=model_dir, kv_memory_gib=0.1, **_engine(device)))
    exact = _generated(runner)
    monkeypatch.setattr(runner, "execute", _with_wire(runner, "fp8_e4m3"))
    expected = _generated(runner)
    assert expected != exact, "the wire changes nothing"
    assert await _answers(lab, model_dir, _rounding_tree(device, wire_dtype="fp8_e4m3")) == expected


def _engine(device: str) -> dict[str, Any]:
    return {"device": device, "dtype": "bfloat16", "recorded_rows": _MAX_RUNNING}


def _rounding_tree(device: str, *, weights: str = "auto", **kv: str) -> dict[str, Any]:
    """Return the spec. Prompts are computed in one chunk, because bf16 rounding depends on shapes."""
    tree = _tree(device, max_running=_MAX_RUNNING) | {"model": {"dtype": "bfloat16", "weights": weights}}
    tree["prefill"] |= {"max_batch_tokens": 512}
    tree["kv"] |= kv
    return tree


def _one_by_one(lab: Lab, model_dir: Path, **engine: Any) -> list[list[int]]:
    pairs = zip(_PROMPTS, _SAMPLINGS, strict=True)
    return [lab.reference.ids(model_dir, [prompt], sampling, **engine)[0] for prompt, sampling in pairs]


async def _answers(lab: Lab, model_dir: Path, tree: dict[str, Any]) -> list[list[int]]:
    """Generate answers one at a time: another batch shape may round to another number."""
    found: list[list[int]] = []
    async with lab.own(model_dir, processes=True, **tree) as cluster, asyncio.timeout(WITHIN_S):
        for prompt, sampling in zip(_PROMPTS, _SAMPLINGS, strict=True):
            answer = await cluster.generate(prompt, sampling)
            assert answer.route.blocks_shipped
            found.append(answer.ids)
    return found


def _generated(runner: ModelRunner) -> list[list[int]]:
    pairs = zip(_PROMPTS, _SAMPLINGS, strict=True)
    return [[token.token_id for token in generate(runner, [prompt], sampling)[0]] for prompt, sampling in pairs]


def _with_wire(runner: ModelRunner, wire_dtype: str) -> Callable[[ScheduledStep | None, Orders], Tensor | None]:
    """Wrap the runner's execute so that each prompt's KV in the pool is what a receiver would get over the wire."""
    codec, execute, pool, layout = codec_for(runner.layout, wire_dtype), runner.execute, runner.pool, runner.layout

    def executed(step: ScheduledStep | None, orders: Orders) -> Tensor | None:
        logits = execute(step, orders)
        for prompt, num_tokens in step.prompts if step else ():
            segment = Segment(first_layer=0, num_layers=layout.num_layers, first_token=0, num_tokens=num_tokens)
            heads = [range(heads.num_heads) for heads in layout.heads]
            slots_T = slots_of(pool, prompt.sequence.blocks, 0, num_tokens)
            payload = torch.empty(codec.num_bytes(segment, heads), dtype=torch.uint8, device=pool.device)
            codec.pack(pool, segment, heads, slots_T, payload)
            codec.unpack(payload, pool, segment, heads, slots_T)
        return logits

    return executed
