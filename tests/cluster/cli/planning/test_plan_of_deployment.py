"""`cluster plan` and `cluster simulate` for a running deployment: its spec, and the rates that it has learned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from core.process.ports import free_port
from core.spec.loader import load_spec, parse_spec
from core.trace.trace import poisson, write_trace
from core.types.request import Role
from core.types.step_timing import StepTiming
from tests.cluster.cli.command import CommandInProcess
from tests.cluster.cli.conftest import Control
from tests.support.replica_reports import replica_report

_SPEC = {
    "name": "a",
    "model": {"source": "hf:org/model"},
    "prefill": {"labels": {"pool": "prefill"}, "resources": {"cpus": 3}},
    "decode": {"labels": {"pool": "decode"}, "kv_memory_gib": 2.0},
}


def _replica(role: Role, *, base_s: float | None) -> dict[str, Any]:
    timing = StepTiming(base_s=base_s, token_s=1e-4) if base_s else None
    return asdict(replica_report(f"{role}-0", role, timing=timing, num_blocks=4000, available_blocks=4000))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    write_trace(poisson(rate=1.0, num_requests=10, num_tokens=300, num_output=10, seed=0), path)
    return str(path)


@pytest.fixture
def deployed(control: Control) -> Callable[[float | None], None]:
    """deployed(base_s): _SPEC, with replicas that take base_s a step; None: not learnt yet."""

    def install(base_s: float | None) -> None:
        # The controller's spec has the port that `cluster deploy` has chosen.
        spec = parse_spec(_SPEC | {"router": {"admin_port": free_port()}}).model_dump(mode="json")
        replicas = [_replica(role, base_s=base_s) for role in Role]
        control({"status": {"spec": spec}, "autoscaling": {"replicas": replicas}}.__getitem__)

    return install


def test_plan_is_for_the_running_deployment(
    trace: str, tmp_path: Path, deployed: Callable[[float | None], None], cluster: CommandInProcess
) -> None:
    output = tmp_path / "plan.yaml"
    command = ["plan", "--trace", trace, "--slo-itl-ms", "100", "--max-replicas", "2", "-o", str(output)]
    deployed(0.05)
    assert "times are those of a (measured)" in cluster.run(*command).out
    written, given = load_spec(str(output)), parse_spec(_SPEC)
    assert written.model_copy(update={"prefill": given.prefill, "decode": given.decode}) == given
    for role in Role:
        changed = {"replicas": given.pool(role).replicas, "max_batch_tokens": given.pool(role).max_batch_tokens}
        assert written.pool(role).model_copy(update=changed) == given.pool(role)
    deployed(0.2)
    slower = cluster.run(*command, "--json")
    assert slower.code == 1 and json.loads(slower.out)["best"] is None, "slower steps miss the limit"
    assert cluster.run(*command, "--spec", "1P1D").code == 0, (
        "another spec is planned at the rates of the default profile"
    )


def test_simulation_has_the_rates_of_the_running_deployment(
    trace: str, deployed: Callable[[float | None], None], cluster: CommandInProcess
) -> None:
    command = ["simulate", "--trace", trace, "--topology", "2P1D", "--json"]
    itl_ms = []
    for base_s in (0.05, 0.2):
        deployed(base_s)
        report = json.loads(cluster.run(*command).out)
        assert (report["profile"], report["profile_origin"]) == ("a", "measured")
        itl_ms.append(report["itl_ms"]["p50"])
    assert itl_ms[1] > 3 * itl_ms[0]
    other = cluster.run(*command, "--profile", "h200-llama-3.1-8b")
    assert json.loads(other.out)["profile"] == "h200-llama-3.1-8b"


@pytest.mark.parametrize("command", [["plan"], ["simulate", "--topology", "1P1D"]])
def test_prediction_needs_learnt_rates(
    command: list[str], trace: str, deployed: Callable[[float | None], None], cluster: CommandInProcess
) -> None:
    deployed(None)
    failed = cluster.run(*command, "--trace", trace)
    assert failed.code == 2 and "has reported step times yet; run a load first" in failed.err
