"""`cluster bench`, `explain` and `profile` against a live router and on this machine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cluster.cli.app import run
from planner.simulator.profile import load_profile
from tests.e2e.conftest import Lab
from tests.support.router_service import admin_url, http_url, router_service


def _trace(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


async def test_a_load_is_measured_through_both_endpoints_and_explained(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = _trace(
        tmp_path / "trace.jsonl",
        [{"timestamp": 100 * i, "input_length": 1024, "output_length": 128, "hash_ids": [0, 1 + i]} for i in range(10)],
    )
    timings = {"output_length": 4, "tokens_per_id": 64, "ttft_ms": 928.2, "itl_ms": 64.33}
    captured = _trace(
        tmp_path / "captured.jsonl",
        [
            {"timestamp": 50.5 * i, "input_length": 100, "hash_ids": [221999303245034, 1 << 40 + i]} | timings
            for i in range(3)
        ],
    )

    async def command(*arguments: str, code: int = 0) -> str:
        assert await asyncio.to_thread(run, list(arguments)) == code
        return capsys.readouterr().out

    model = lab.checkpoint("llama")
    async with (
        lab.own(model, model={"dtype": "float32"}) as cluster,
        router_service(cluster) as service,
    ):
        grpc, http = f"127.0.0.1:{service.grpc_port}", http_url(service)
        admin = admin_url(service).removeprefix("http://")
        for seed, endpoint in enumerate((grpc, http)):
            options = ["--scale-tokens", "1/16", "--speedup", "2", "--seed", str(seed), "--json"]
            report = json.loads(await command("bench", "--trace", trace, "--endpoint", endpoint, *options))
            assert (report["completed"], report["prompt_tokens"], report["output_tokens"]) == (10, 640, 80)
            assert report["predicted"] is None and "--endpoint" in report["no_prediction"]
            assert 0 < report["reuse_share"] <= 0.5
            assert report["ttft_ms"]["mean"] > 0 and report["itl_ms"]["mean"] > 0
        load = ["--poisson", "20", "--requests", "5", "--prompt-tokens", "20", "--output-tokens", "3"]
        output = await command("bench", *load, "--endpoint", grpc)
        assert "5 requests" in output and "no prediction: " in output and "PREDICTED" not in output
        assert "3 requests" in await command("bench", "--trace", captured, "--endpoint", grpc)
        await command("bench", "--trace", trace, "--endpoint", grpc, code=1)  # exceeds the model's context

        path = tmp_path / "live.json"
        live = ["--endpoint", http, "--admin", admin, "--model", str(model), "--dtype", "float32", "-o", str(path)]
        await command("profile", "--live", *live)
        assert load_profile(str(path)).timing().prefill_s(64, after=0, chunk=512) > 0

        generated = await command("generate", "<5>", "--max-tokens", "3", "--endpoint", grpc, "--json")
        request_id = json.loads(generated.splitlines()[-1])["request_id"]
        [[attempt]] = json.loads(await command("explain", request_id, "--admin", admin, "--json")).values()
        first, *others = attempt["options"]
        known = attempt["replicas"]["prefill-0"]["timing"]  # learned from the previous load
        assert known["base_s"] + known["token_s"] > 0 and known["pair_s"] >= 0
        assert first["decode"] == "decode-1" and all(option["cost_s"] >= first["cost_s"] for option in others)
        assert "decode-1" in await command("explain", request_id, "--admin", admin)
        await command("explain", "nobody", "--admin", admin, code=2)


def test_a_profile_of_this_machine_can_be_simulated(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = lab.checkpoint("llama", max_position_embeddings=4096)
    path = tmp_path / "here.json"
    options = ["--model", str(model), "--dtype", "float32", "--replicas", "2", "--seconds", "0.02"]
    assert run(["profile", "-o", str(path), *options]) == 0
    assert "slowdown" in capsys.readouterr().out
    profile = load_profile(str(path))
    assert (profile.name, profile.origin, len(profile.slowdown)) == ("here", "measured", 2)
    assert profile.slowdown[0] == 1.0 and profile.decode_steps and profile.link.bytes_per_s > 0
    steps = profile.timing()
    assert steps.prefill_s(1536, after=0, chunk=2048) > steps.prefill_s(32, after=0, chunk=2048) > 0

    trace = _trace(
        tmp_path / "trace.jsonl",
        [{"timestamp": 100 * i, "input_length": 512, "output_length": 64, "hash_ids": [i]} for i in range(10)],
    )
    simulate = ["--topology", "2P2D", "--scale-tokens", "1/16", "--block-size", "16", "--profile", str(path), "--json"]
    assert run(["simulate", "--trace", trace, *simulate]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["completed"] == 10 and report["ttft_ms"]["mean"] > 0 < report["itl_ms"]["mean"]
