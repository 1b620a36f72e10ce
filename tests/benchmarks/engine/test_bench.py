"""Contract of `python -m benchmarks engine --json`: output and rejected options."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.app import run
from benchmarks.engine import bench
from core.model import source as model_source
from tests.engine.tiny_models import MakeModel
from tests.support.grids import quick


def test_json_output(
    tiny_model: MakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = tiny_model("llama")
    # The directory has no tokenizer, so it is not a valid source.
    monkeypatch.setattr(model_source, "resolve", lambda source: directory)
    monkeypatch.setattr(bench, "_NUM_STEPS", 8)
    options = ["--batch", "1,3", "--context", "20", "--prefill", "33", "--dtype", "float32", "--threads", "1"]
    threads = torch.get_num_threads()
    try:
        assert run(["engine", *options, "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out)
    assert {key: result[key] for key in ("model", "dtype", "weights")} == {
        "model": directory.name,
        "dtype": "float32",
        "weights": "auto",
    }
    assert result["computed_by"] == "torch"
    assert [(row["batch"], row["context"]) for row in result["decode"]] == [(1, 20), (3, 20)]
    for row in result["decode"]:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_ms"] * 1e3, rel=0.05)
        assert row["bandwidth_share"] > 0
    assert [row["tokens"] for row in result["prefill"]] == [33] and result["prefill"][0]["tokens_per_s"] > 0
    assert result["bandwidth_gb_s"] > 0 and result["threads"] >= 1


@pytest.mark.parametrize("has_kernels", quick([True, False], [False]))
def test_missing_kernels_are_reported(
    has_kernels: bool, tiny_model: MakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "resolve", lambda source: tiny_model("llama")[0])
    monkeypatch.setattr(bench, "_NUM_STEPS", 2)
    monkeypatch.setattr(bench, "open_kernels", lambda **_: object() if has_kernels else None)
    options = ["--batch", "1", "--context", "5", "--prefill", "9", "--dtype", "float32"]
    assert run(["engine", *options]) == 0
    assert ("a C++ compiler" in capsys.readouterr().out) != has_kernels


def test_invalid_counts_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["engine", "--batch", "1,none"]) == 2
    assert "--batch 1,none" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_reported(
    tiny_model: MakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "resolve", lambda source: tiny_model("llama")[0])
    assert run(["engine", "--gpu"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
