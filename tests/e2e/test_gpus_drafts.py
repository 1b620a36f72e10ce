"""GPU deployment with each draft method: answers equal those of one process without drafts.

The same on a CPU, where it is slow and says that the test is right.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from core.types.request import Role, Sampling
from router.routing.plain_policies import RoundRobin
from tests.e2e.conftest import Lab, exact_tree, on_device
from tests.engine.spec_decode.draft_models.smaller_model import first_layers
from tests.engine.spec_decode.heads.head_files import write_eagle, write_medusa
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.steps import prompts
from tests.support.draft_always import draft_always
from tests.support.local_cluster import LocalCluster, LocalReplica

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


@pytest.mark.parametrize("method", ["suffix", "draft", "self", "medusa", "eagle", "mtp"])
async def test_answers_are_those_of_one_process(lab: Lab, tmp_path: Path, method: str, device: str) -> None:
    model_dir, drafts = _drafting(method, lab.checkpoint("llama"), tmp_path)
    tree = on_device(device, exact_tree(1, 0))
    tree["speculation"] = {"method": method, "model": str(drafts) if drafts else None, "max_tokens": 3}
    tree["decode"] |= {"max_running": 16}  # bounds the rows and drafted tokens with logits
    expected = lab.reference.ids(model_dir, _PROMPTS, _SAMPLINGS, device=device)
    async with lab.own(model_dir, processes=True, policy=RoundRobin(), **tree) as cluster:
        adding = cluster.add(Role.DECODE), cluster.add(Role.DECODE, prepare=draft_always)
        as_it_pays, always = await asyncio.gather(*adding)
        for _ in range(4):  # twice per replica, so that drafts use the first answers
            answers = await cluster.generate_all(_PROMPTS, _SAMPLINGS)
            assert [answer.ids for answer in answers] == expected
        await cluster.idle()
        await cluster.until(lambda: _num_drafted(cluster, as_it_pays))
        await cluster.until(lambda: _num_drafted(cluster, always) > 100)


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


def _num_drafted(cluster: LocalCluster, replica: LocalReplica) -> int:
    return sum(sum(one.tokens) for one in cluster.seen(replica).status.totals.drafted)
