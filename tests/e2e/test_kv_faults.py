"""Benchmark command for the public list of bad KV reads, on a small model, and its detection of harm."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from benchmarks.kv_faults.names import CASES, CaseOutcome
from benchmarks.kv_faults.stage import stage
from benchmarks.kv_faults.strikes import STRIKES
from tests.e2e.conftest import Lab

_LEASE_S = 4.0
_QUICK = ["unknown", "out-of-range", "consumed", "stale", "unwritten", "foreign-prefix"]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(_QUICK, id="of a reference"),
        pytest.param([name for name in STRIKES if name not in _QUICK], id="the others", marks=pytest.mark.slow),
    ],
)
async def test_bad_references_change_no_answer_and_leak_no_block(lab: Lab, cases: list[str]) -> None:
    async with stage(lab.checkpoint("llama"), lab.redis_url, lease_s=_LEASE_S) as on:
        for case in cases:
            outcome = await on.begin(case)
            await STRIKES[case](on)
            await on.settle(within_s=30.0)
            assert outcome.is_clean, outcome
            assert outcome.seen and (outcome.num_answers or case in ("expired", "client-gone")), outcome
            assert (outcome.seen == "answered") == (case == "undisturbed"), outcome


async def test_harm_is_detected(lab: Lab) -> None:
    async with stage(lab.checkpoint("llama"), lab.redis_url, lease_s=60.0) as on:
        outcome = await on.begin("stale")
        one, other = await on.prompt(), await on.prompt()
        answers = [await on.ask(one), await on.ask(other)]
        assert outcome.is_clean and outcome.num_answers == 2
        on.count(one, answers[1])
        on.count(one, [*answers[0][:-1], 0])
        assert (outcome.num_wrong, outcome.num_foreign) == (2, 1)
        held = await on.hold()
        await on.settle(within_s=0.0)
        assert outcome.num_lost == 5, "blocks of 16 for 70 tokens"
        await on.give_up(held)
        await on.settle(within_s=30.0)
        assert outcome.num_lost == 0
        on.prefill.send(signal.SIGKILL)
        await on.settle(within_s=0.0)
        assert outcome.num_dead == 1


@pytest.mark.parametrize("field", ["num_wrong", "num_foreign", "num_failed", "num_hung", "num_lost", "num_dead"])
def test_harm_of_any_kind_is_not_clean(field: str) -> None:
    clean = CaseOutcome("stale", "refused", num_answers=3)
    assert clean.is_clean and not replace(clean, **{field: 1}).is_clean


def test_every_listed_case_is_run() -> None:
    assert list(STRIKES) == list(CASES)
