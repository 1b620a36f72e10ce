"""`cluster profile` on this machine, and a simulation with the profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli.app import run
from planner.simulator.profile import load_profile
from tests.e2e.conftest import Checkpoint


def test_a_profile_of_this_machine_can_be_simulated(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = checkpoint("llama", max_position_embeddings=4096)
    path = tmp_path / "here.json"
    options = ["--model", str(model), "--dtype", "float32", "--replicas", "2", "--seconds", "0.02"]
    assert run(["profile", "-o", str(path), *options]) == 0
    assert "slowdown" in capsys.readouterr().out
    profile = load_profile(str(path))
    assert (profile.name, profile.origin, len(profile.slowdown)) == ("here", "measured", 2)
    assert profile.slowdown[0] == 1.0 and profile.decode_steps and profile.link.bytes_per_s > 0
    steps = profile.timing()
    assert steps.prefill_s(1536, after=0, chunk=2048) > steps.prefill_s(32, after=0, chunk=2048) > 0

    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 512, "output_length": 64, "hash_ids": [i]} for i in range(10)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    simulate = ["--topology", "2P2D", "--scale-tokens", "1/16", "--block-size", "16", "--profile", str(path), "--json"]
    assert run(["simulate", "--trace", str(trace), *simulate]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["completed"] == 10 and report["ttft_ms"]["mean"] > 0 < report["itl_ms"]["mean"]
