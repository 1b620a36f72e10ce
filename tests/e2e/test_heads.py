"""Draft heads: drafts do not depend on where a sequence's KV came from, and answers equal those without heads."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from core.types.request import Role, Sampling
from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import ModelProposer, Proposal
from engine.spec_decode.speculation import Speculation
from router.routing.candidates import Option
from tests.e2e.conftest import Checkpoint, Lab, exact_tree
from tests.engine.spec_decode.heads.eagle1_files import eagle1_reference, write_eagle1
from tests.engine.spec_decode.heads.head_files import eagle_reference, medusa_reference, write_eagle, write_medusa
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.steps import prompts
from tests.engine.tiny_models import LATENT
from tests.support.fake_policy import FakePolicy
from tests.support.grids import quick
from tests.support.local_cluster import moved
from tests.support.long_answers import Ceiling

_NUM_TOKENS = 3
_GREEDY = Sampling(max_tokens=20, temperature=0.0)
_SAMPLED = Sampling(max_tokens=20, temperature=1.0, seed=5)
_PROMPTS = prompts(20, 33, 48, 18)
_WHOLE = _PROMPTS[2]  # three blocks; the second time, the decode replica computes the last one after two shipped ones
_TELLING = 52  # tokens of _WHOLE and its answer; drafts at this length depend on all entries
_LATENT_ROW = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
# Numbers of a token in a layer of the model, and in the head's own.
_ROWS = {"eagle": (2 * 2 * 16, 2 * 16), "eagle1": (2 * 2 * 16,) * 2, "mtp": (_LATENT_ROW,) * 2}
# GiB of a spare block of the head's layer; and of a block: three layers of the model, the head's, and a row of features
_SPARES = {kind: own * 4 * 16 / 2**30 for kind, (_, own) in _ROWS.items()}
_BLOCKS = {kind: ((3 * row + own) * 4 * 16 + 48 * 4) / 2**30 for kind, (row, own) in _ROWS.items()}

pytestmark = pytest.mark.usefixtures("one_thread")

_ON_RANKS = quick(
    [("eagle", (1, 1)), ("eagle", (2, 2)), ("eagle1", (1, 1)), ("mtp", (1, 1)), ("mtp", (2, 2))], [("eagle", (1, 1))]
)
_HANDED_OVER = quick(
    [
        *(("eagle", tp) for tp in ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4))),  # (2, 4): 2 KV heads, each on two ranks
        *(("mtp", tp) for tp in ((1, 1), (1, 2), (2, 1), (2, 2))),
        *(("medusa", (1, 1)), ("medusa", (2, 2)), ("eagle1", (1, 1)), ("eagle1", (1, 2))),
    ],
    [("medusa", (1, 1)), ("eagle", (1, 2)), ("mtp", (1, 1))],
)
_CHAINED = quick(["eagle", "eagle1", "mtp"], ["eagle"])

Guesses = Callable[[list[int]], list[int]]


class Recorded:
    """Proposer that drafts for every row of every step and records its drafts."""

    def __init__(self, heads: ModelProposer, drafts: list[tuple[list[int], list[int]]]) -> None:
        self._heads, self._drafts = heads, drafts

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        proposals = self._heads.propose(sequences, _NUM_TOKENS)
        pairs = zip(sequences, proposals, strict=True)  # sampled rows are tested elsewhere
        self._drafts += [(list(s.tokens), list(p.tokens)) for s, p in pairs if s.request.sampling.is_greedy]
        return proposals

    def finished(self, sequence: Sequence) -> None:
        pass


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Record drafts of all replicas of this process: a sequence's tokens, and the drafted next tokens."""
    drafts: list[tuple[list[int], list[int]]] = []

    def of(
        method: str, *, max_tokens: int, vocab_size: int, models: dict[str, ModelProposer], **others: Any
    ) -> Speculation:
        recorded = {name: Recorded(heads, drafts) for name, heads in models.items()}
        return Speculation(recorded, max_tokens=max_tokens, vocab_size=vocab_size, backs_off=False)

    monkeypatch.setattr(Speculation, "of", of)
    return drafts


def _heads(kind: str, model_dir: Path, directory: Path) -> Guesses:
    """Write the heads' weights. Returns the function that computes the expected drafts."""
    if kind == "mtp":
        mtp = write_mtp(directory)
        shutil.copy(model_dir / "tokenizer.json", directory)
        return lambda tokens: mtp.reference(tokens, _NUM_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    if kind == "medusa":
        medusa = write_medusa(directory, num_heads=_NUM_TOKENS)
        return lambda tokens: medusa_reference(model, medusa, tokens)
    if kind == "eagle1":
        eagle1 = write_eagle1(directory)
        return lambda tokens: eagle1_reference(model, eagle1, tokens, _NUM_TOKENS)
    eagle = write_eagle(directory)
    return lambda tokens: eagle_reference(model, eagle, tokens, _NUM_TOKENS, layers=(0, 1, 2))


def _tree(
    kind: str, directory: Path, *, decode: int = 1, prefill: int = 1, tp: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    """Return the spec. tp: ranks of a prefill and of a decode replica."""
    method = "eagle" if kind == "eagle1" else kind
    speculation = {"method": method, "model": None if kind == "mtp" else str(directory), "max_tokens": _NUM_TOKENS}
    return exact_tree(prefill, decode, tp=tp) | {"speculation": speculation}


def _served(kind: str, checkpoint: Checkpoint, directory: Path) -> Path:
    """Return the target model of the heads. `mtp` heads are part of it."""
    return directory if kind == "mtp" else checkpoint("llama")


async def _check(drafts: list[tuple[list[int], list[int]]], guesses: Guesses, *, least: int) -> None:
    """Assert that drafts are as expected, for the first steps of sequences and for every fourth later one."""
    known = cache(lambda tokens: guesses(list(tokens)))
    first_lengths = {len(tokens) for tokens, _ in drafts[:8]}
    looked_at = [one for i, one in enumerate(drafts) if i % 4 == 0 or len(one[0]) in {*first_lengths, _TELLING}]
    looked_at.sort(key=lambda one: -len(one[0]))

    def wrong() -> list[list[int]]:
        return [tokens for tokens, found in looked_at if found != known(tuple(tokens))]

    assert len(drafts) >= least and not await asyncio.to_thread(wrong)
    drafts.clear()


@pytest.mark.parametrize(("kind", "tp"), _HANDED_OVER)
async def test_after_a_handoff_and_a_cache_hit(
    kind: str, tp: tuple[int, int], lab: Lab, tmp_path: Path, drafts: list[Any]
) -> None:
    guesses = _heads(kind, lab.checkpoint("llama"), tmp_path)
    model_dir = _served(kind, lab.checkpoint, tmp_path)
    async with lab.own(model_dir, **_tree(kind, tmp_path, tp=tp)) as cluster:
        answers = await cluster.generate_all(_PROMPTS, _SAMPLED)
        assert [answer.ids for answer in answers] == lab.reference.ids(model_dir, _PROMPTS, _SAMPLED)
        for _ in range(2):  # the second time, the prefix is cached
            answers = await cluster.generate_all(_PROMPTS, _GREEDY)
            assert [answer.ids for answer in answers] == lab.reference.ids(model_dir, _PROMPTS, _GREEDY)
            firsts = {tuple(tokens) for tokens, _ in drafts if tokens[:-1] in _PROMPTS}
            assert len(firsts) == len(_PROMPTS), "a first step had no draft"
            await _check(drafts, guesses, least=60)


@pytest.mark.parametrize(("kind", "tp"), _ON_RANKS)
async def test_after_a_move(
    kind: str, tp: tuple[int, int], lab: Lab, tmp_path: Path, drafts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    guesses = _heads(kind, lab.checkpoint("llama"), tmp_path)
    model_dir = _served(kind, lab.checkpoint, tmp_path)
    async with lab.own(model_dir, **_tree(kind, tmp_path, tp=tp)) as cluster:
        ceiling = Ceiling(9)
        ceiling.arm(monkeypatch.setattr)
        answer = await moved(cluster, cluster.generate(_PROMPTS[0], _GREEDY), ceiling)
        assert answer.ids == lab.reference.ids(model_dir, _PROMPTS, _GREEDY)[0]
        await _check(drafts, guesses, least=15)


@pytest.mark.parametrize(("kind", "tp"), _ON_RANKS)
async def test_after_a_pull(kind: str, tp: tuple[int, int], lab: Lab, tmp_path: Path, drafts: list[Any]) -> None:
    """The fetching replica is a prefill replica that ships on, or a decode replica that computes the prompt."""
    guesses = _heads(kind, lab.checkpoint("llama"), tmp_path)
    model_dir, policy = _served(kind, lab.checkpoint, tmp_path), FakePolicy()
    first = prompts(70)[0]
    tree = _tree(kind, tmp_path, prefill=2, decode=2, tp=tp)
    async with lab.own(model_dir, policy=policy, **tree) as cluster:
        for prompt, prefill, source, decode in (
            (first, "prefill-0", None, "decode-2"),
            (first + prompts(30)[0], "prefill-1", "prefill-0", "decode-2"),
            (first + prompts(25)[0], None, "prefill-0", "decode-3"),
        ):
            fetch = 64 if source else 0
            policy.ways[len(prompt)] = [Option(prefill=prefill, decode=decode, fetch_from=source, fetch_tokens=fetch)]
            answer = await cluster.generate(prompt, _GREEDY)
            assert answer.route.fetched_tokens == fetch
            await _check(drafts, guesses, least=10)


@pytest.mark.parametrize("kind", _CHAINED)
async def test_after_a_lower_tier(kind: str, lab: Lab, tmp_path: Path, drafts: list[Any]) -> None:
    """The decode replica computes prompts itself."""
    guesses = _heads(kind, lab.checkpoint("llama"), tmp_path)
    model_dir, block = _served(kind, lab.checkpoint, tmp_path), _BLOCKS[kind]
    tree = _tree(kind, tmp_path)
    beside = 64 * (4 * 48 * 4) / 2**30 + 64 * _SPARES[kind]  # for 64 rows: features of four steps, and a spare block
    tree["decode"] |= {"kv_memory_gib": 14.1 * block + beside, "kv_host_gib": 60 * block}
    tree["router"] |= {"max_local_prefill": 1000}
    longer = prompts(100, 100, 100)
    async with lab.own(model_dir, **tree) as cluster:
        for prompt in (*longer, longer[0]):
            await cluster.generate(prompt, _GREEDY)
        await _check(drafts, guesses, least=60)
        await cluster.idle()
        assert cluster.totals(Role.DECODE).host_hit_tokens == 96
