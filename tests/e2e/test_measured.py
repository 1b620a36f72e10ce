"""`cluster bench` and `cluster explain` against a live router, on both endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.cli.app import run
from core.process.ports import free_port
from frontend.service import RouterService
from planner.simulator.profile import load_profile
from tests.e2e.conftest import Checkpoint
from tests.support.identities import router
from tests.support.local_cluster import local_cluster
from tests.support.waiting import becomes


@pytest.fixture
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama")


@pytest.fixture
async def endpoints(model: Path, redis_url: str) -> AsyncIterator[tuple[str, str, str]]:
    """Yield the gRPC, OpenAI and admin endpoints of a 1P1D deployment."""
    tree = {"model": {"dtype": "float32"}, "router": {"grpc_port": free_port(), "http_port": free_port()}}
    async with local_cluster(model, redis_url, **tree) as cluster:
        service = await RouterService.open(
            cluster.spec,
            credentials=cluster.credentials,
            identity=cluster.identity(router("router-1")),
        )
        try:
            await becomes(lambda: all(service.health().values()))
            http, admin = ("{}:{}".format(*address) for address in (service.http_address, service.admin_address))
            yield f"127.0.0.1:{service.grpc_port}", f"http://{http}", admin
        finally:
            await service.close()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Write a trace of ten prompts, each with the previous one's prefix."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 1024, "output_length": 128, "hash_ids": [0, 1 + i]} for i in range(10)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def captured(tmp_path: Path) -> str:
    """Write a trace in the format of `cluster capture`."""
    path = tmp_path / "captured.jsonl"
    rows = [
        {"timestamp": 50.5 * i, "input_length": 100, "output_length": 4, "hash_ids": [221999303245034, 1 << 40 + i]}
        for i in range(3)
    ]
    timings = {"tokens_per_id": 64, "ttft_ms": 928.2, "itl_ms": 64.33}
    path.write_text("\n".join(json.dumps(row | timings) for row in rows))
    return str(path)


async def test_a_load_is_measured_through_both_doors_and_explained(
    endpoints: tuple[str, str, str],
    model: Path,
    trace: str,
    captured: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grpc, http, admin = endpoints
    for seed, endpoint in enumerate((grpc, http)):
        options = ["--scale-tokens", "1/16", "--speedup", "2", "--seed", str(seed), "--endpoint", endpoint, "--json"]
        assert await asyncio.to_thread(run, ["bench", "--trace", trace, *options]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["completed"], report["prompt_tokens"], report["output_tokens"]) == (10, 640, 80)
        assert report["predicted"] is None and "--endpoint" in report["no_prediction"]
        assert 0 < report["reuse_share"] <= 0.5 and report["ttft_ms"]["mean"] > 0 and report["itl_ms"]["mean"] > 0
    load = ["--poisson", "20", "--requests", "5", "--prompt-tokens", "20", "--output-tokens", "3", "--endpoint", grpc]
    assert await asyncio.to_thread(run, ["bench", *load]) == 0
    output = capsys.readouterr().out
    assert "5 requests" in output and "no prediction: " in output and "PREDICTED" not in output
    assert await asyncio.to_thread(run, ["bench", "--trace", captured, "--endpoint", grpc]) == 0
    assert "3 requests" in capsys.readouterr().out
    assert (
        await asyncio.to_thread(run, ["bench", "--trace", trace, "--endpoint", grpc]) == 1
    )  # exceeds the model's context

    path = tmp_path / "live.json"
    router = ["--endpoint", http, "--admin", admin]
    live = ["profile", "--live", *router, "--model", str(model), "--dtype", "float32", "-o", str(path)]
    assert await asyncio.to_thread(run, live) == 0
    assert load_profile(str(path)).timing().prefill_s(64, after=0, chunk=512) > 0
    capsys.readouterr()

    assert await asyncio.to_thread(run, ["generate", "<5>", "--max-tokens", "3", "--endpoint", grpc, "--json"]) == 0
    request_id = json.loads(capsys.readouterr().out.splitlines()[-1])["request_id"]
    assert await asyncio.to_thread(run, ["explain", request_id, "--admin", admin, "--json"]) == 0
    [[attempt]] = json.loads(capsys.readouterr().out).values()
    options = attempt["options"]
    known = attempt["replicas"]["prefill-0"]["timing"]  # learned from the previous load
    assert known["base_s"] + known["token_s"] > 0 and known["pair_s"] >= 0
    assert options[0]["decode"] == "decode-1" and all(option["cost_s"] >= options[0]["cost_s"] for option in options)
    assert await asyncio.to_thread(run, ["explain", request_id, "--admin", admin]) == 0
    assert "decode-1" in capsys.readouterr().out
    assert await asyncio.to_thread(run, ["explain", "nobody", "--admin", admin]) == 2
