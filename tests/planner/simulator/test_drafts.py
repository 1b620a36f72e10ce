"""Simulated speculative decoding, against calculated yields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import pytest

from cluster.cli.planning.profile import learned_rates
from core.rpc.worker_pb2 import Drafted, Status, StepTiming, Totals
from core.trace.trace import TraceRequest, poisson
from core.types.errors import ClusterError
from core.types.request import Role
from planner.simulator.drafts import by_place, by_yield, draft_table
from planner.simulator.profile import Drafts, FleetSetup, load_profile
from planner.simulator.run import simulate
from tests.router.telemetry.test_view import shown_replicas

_PROFILE = load_profile("h100-llama-3.1-8b")
_SETUP = FleetSetup(num_prefill=1, num_decode=1, block_size=64, kv_tokens=131_072)
_ALONE = poisson(rate=0.2, num_requests=12, num_tokens=500, num_output=200, seed=1)  # hardly ever two at a time
_CROWD = poisson(rate=200, num_requests=200, num_tokens=100, num_output=50, seed=2)
_GOOD = [0.9, 0.8, 0.7, 0.6]


def _run(drafts: Drafts | None, trace: Sequence[TraceRequest], *, max_running: int = 256) -> dict[str, Any]:
    return simulate(replace(_SETUP, max_running=max_running), _PROFILE.model_copy(update={"drafts": drafts}), trace)


@pytest.mark.parametrize(("accepted", "guessed"), [(_GOOD, 1.0), (_GOOD, 0.5), ([0.5] * 8, 1.0)])
def test_tokens_per_row_match_the_draft_rates(accepted: list[float], guessed: float) -> None:
    drafts = Drafts(accepted=accepted, guessed=guessed)
    found = _run(drafts, _ALONE)
    assert found["completed"] == 12 and found["output_tokens"] == 12 * 200
    promised = 1 + guessed * sum(accumulate(accepted, mul))
    assert found["drafts"]["tokens_per_row"] == pytest.approx(promised, rel=0.15)
    plain = _run(None, _ALONE)
    assert "drafts" not in plain
    faster = plain["itl_ms"]["mean"] / found["itl_ms"]["mean"]
    rates = [line.tokens_per_s for line in draft_table(_PROFILE.decode_timing(), drafts, 1, context=600)]
    assert faster == pytest.approx(max(rates) / rates[0], rel=0.15)


def test_rare_proposals_occur_at_the_given_rate() -> None:
    """Simulated rows never back off after steps without a proposal: `guessed` already covers those."""
    found = _run(Drafts(accepted=_GOOD, guessed=0.08), _ALONE)
    promised = 0.08 * sum(accumulate(_GOOD, mul))
    assert found["drafts"]["tokens_per_row"] - 1 == pytest.approx(promised, rel=0.25)


@pytest.mark.parametrize(
    "drafts",
    [Drafts(accepted=[0.0] * 4), Drafts(accepted=_GOOD, ask_place_s=0.05), Drafts(accepted=_GOOD, ask_s=0.05)],
    ids=["wrong", "slow passes", "slow to ask"],
)
def test_unprofitable_drafts_are_skipped(drafts: Drafts) -> None:
    long = poisson(rate=10, num_requests=60, num_tokens=100, num_output=400, seed=3)  # the first trials weigh little
    found, plain = _run(drafts, long), _run(None, long)
    assert found["drafts"]["drafted"] < 0.02 * found["output_tokens"]
    assert found["itl_ms"]["mean"] < 1.05 * plain["itl_ms"]["mean"]


def test_a_full_batch_drafts_less() -> None:
    drafts = Drafts(accepted=_GOOD)
    alone, crowd = _run(drafts, _ALONE), _run(drafts, _CROWD, max_running=64)
    per_token = [one["drafts"]["drafted"] / one["output_tokens"] for one in (alone, crowd)]
    assert per_token[1] < 0.8 * per_token[0]


def test_what_replicas_have_drafted_says_how_good_drafts_are() -> None:
    told = Drafted(method="suffix", tokens=[100, 80, 40, 3], accepted=[80, 40, 10, 3])
    decode = Status(
        tokens_per_row=1.5,
        link_bytes_per_s=1e9,
        timing=StepTiming(base_s=0.01),
        totals=Totals(generated_tokens=300, drafted=[told]),
    )
    prefill = Status(timing=StepTiming(base_s=0.01))
    with pytest.raises(ClusterError, match="run a load"):
        learned_rates(shown_replicas({"prefill-0": prefill, "decode-1": Status()}))
    learned = learned_rates(shown_replicas({"prefill-0": prefill, "decode-1": decode}))
    assert learned.steps[Role.PREFILL].base_s == 0.01 and learned.link_bytes_per_s == 1e9
    found = by_place(learned.drafted, learned.accepted, num_steps=learned.num_row_steps)
    assert found and found.guessed == 0.5  # 100 of 200 steps
    assert found.accepted == pytest.approx([0.8, 0.5 / 0.8, 0.25 / 0.5])
    assert by_place([], [], num_steps=100) is None


@pytest.mark.parametrize(("tokens", "drafted"), [(2.5, 4.0), (1.3, 0.5), (1.05, 0.2), (5.0, 4.0)])
def test_draft_yields_give_acceptance_rates(tokens: float, drafted: float) -> None:
    found = by_yield(tokens, drafted)
    assert found
    assert 1 + found.guessed * sum(accumulate(found.accepted, mul)) == pytest.approx(tokens, rel=0.01)
    assert found.guessed * len(found.accepted) == pytest.approx(drafted, rel=0.01)
    assert by_yield(1.0, 0.0) is None and by_yield(0.0, 0.0) is None
