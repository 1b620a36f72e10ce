"""Contract of `python -m benchmarks kv --json` between two real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.app import run
from benchmarks.kv import run as bench_run
from core.model import source as model_source
from tests.engine.tiny_models import random_model, tiny_config
from tests.support.grids import quick


@pytest.mark.parametrize("encrypt", quick([False, True], [True]))
def test_json_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, encrypt: bool
) -> None:
    random_model(tiny_config("llama")).save_pretrained(tmp_path)
    monkeypatch.setattr(model_source, "resolve", lambda source: tmp_path)
    monkeypatch.setattr(bench_run, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(bench_run, "_NUM_TRIES", 1)
    threads = torch.get_num_threads()
    try:
        options = ["--message", "64,256", "--prompt", "20,100", "--dtype", "float32", "--json"]
        assert run(["kv", *options, *(["--encrypt"] if encrypt else [])]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out)
    assert result["encrypt"] is encrypt
    assert [row["bytes"] for row in result["messages"]] == [64 << 10, 256 << 10]
    for row in result["messages"]:
        assert all(row[f"{way}_gb_s"] > 0 for way in ("memcpy", "tcp", "tcp_ring", "wire", "raw", "fp8"))
        assert row["wire_of_tcp"] == pytest.approx(row["wire_gb_s"] / row["tcp_gb_s"], abs=0.01)
    assert [row["tokens"] for row in result["prompts"]] == [20, 100]
    short, long = result["prompts"]
    assert 3 < long["wire_bytes"] / short["wire_bytes"] < 6
    for row in result["prompts"]:
        assert row["transfer_ms"] > 0 and row["exposed_ms"] > 0 and 0 <= row["hidden_share"] < 1
