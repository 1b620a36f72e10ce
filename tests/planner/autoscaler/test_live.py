"""Prediction of a load from the routers' reports of their replicas."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from core.spec.schema import AutoscaleSpec, Spec
from core.trace.trace import poisson
from core.trace.traffic import ReplicaReport, Slo
from core.types.errors import ClusterError
from core.types.request import Role
from core.types.step_timing import StepTiming
from planner.autoscaler.live import fleets_of, predict_load, saturation_of
from tests.support.replica_reports import replica_report

_LOAD = poisson(rate=2.0, num_requests=40, num_tokens=500, num_output=20, seed=1)
_TIMING = StepTiming(base_s=0.02, token_s=0.001, pair_s=0.0, context_s=0.0)


def _news(replica: str, role: Role) -> ReplicaReport:
    return replica_report(replica, role, timing=_TIMING)


def _spec(num_prefill: int, num_decode: int) -> Spec:
    return Spec.model_validate({"prefill": {"replicas": num_prefill}, "decode": {"replicas": num_decode}})


_ONE_EACH = [_news("prefill-0", Role.PREFILL), _news("decode-0", Role.DECODE)]


def test_prediction_uses_the_rates_of_the_replicas() -> None:
    found = predict_load(_spec(1, 1), _ONE_EACH, _LOAD, Slo())
    assert found["completed"] == 40 and found["output_tokens"] == 800
    assert 520 <= found["ttft_ms"]["p50"] and 20 <= found["itl_ms"]["p50"] <= 80
    twice = [replace(one, timing=replace(_TIMING, token_s=0.002)) for one in _ONE_EACH]
    assert predict_load(_spec(1, 1), twice, _LOAD, Slo())["ttft_ms"]["p50"] > 1000


def test_decode_only_deployment_is_simulated_as_colocated() -> None:
    found = predict_load(_spec(0, 1), _ONE_EACH[1:], _LOAD, Slo())
    assert found["completed"] == 40 and found["transfer_bytes"] == 0


@pytest.mark.parametrize(
    ("cache", "num_states", "num_parts"),
    [
        ({"window": 512, "window_bytes_per_token": 800, "num_window_parts": 301}, 0, 301),
        ({"state_bytes": 5000, "num_states": 12}, 12, None),
    ],
)
def test_simulated_pools_are_those_that_the_replicas_report(
    cache: dict[str, Any], num_states: int, num_parts: int | None
) -> None:
    reports = [replica_report(one.replica, one.role, timing=_TIMING, **cache) for one in _ONE_EACH]
    kv = fleets_of(_spec(1, 1), AutoscaleSpec(), reports).profile.kv
    sizes = kv.pool_sizes(kv.pool_tokens, block_size=16, max_batch_tokens=2048)
    assert sizes == (1000, num_states, num_parts) and kv.wire_cache(16) == reports[0].cache


@pytest.mark.parametrize("replicas", [[], [replace(one, timing=None) for one in _ONE_EACH]])
def test_unknown_rates_raise_an_error(replicas: list[ReplicaReport]) -> None:
    with pytest.raises(ClusterError, match="yet"):
        predict_load(_spec(1, 1), replicas, _LOAD, Slo())


def test_replica_report_round_trip() -> None:
    for news in (_ONE_EACH[0], replace(_ONE_EACH[1], timing=None)):
        assert ReplicaReport.of({**asdict(news), "from_a_newer_version": 1}) == news


def test_saturation_accounts_for_drafted_tokens() -> None:
    rules = AutoscaleSpec(slo_itl_ms=40)
    plain = saturation_of(_ONE_EACH, rules, num_waiting=0)
    drafting = [replace(one, tokens_per_row=2.0) for one in _ONE_EACH]
    assert (plain.decode, saturation_of(drafting, rules, num_waiting=0).decode) == (0.5, 0.25)
