"""Output of `python -m benchmarks engine --host`."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.app import run
from core.model import source as model_source
from tests.engine.tiny_models import MakeModel


def test_json_output(
    tiny_model: MakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = tiny_model("llama")
    monkeypatch.setattr(model_source, "resolve", lambda source: directory)
    threads = torch.get_num_threads()
    try:
        assert run(["engine", "--host", "--batch", "2,5", "--context", "20,404", "--threads", "1", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out)
    shapes = [(row["batch"], row["context"]) for row in result["host"]]
    assert shapes == [(2, 20), (5, 20), (2, 404), (5, 404)] and result["threads"] == 1
    for row in result["host"]:
        assert 0 < row["host_ms"] and 0 < row["greedy_ms"] and 0 < row["ahead_ms"]
        assert row["idle_ms"] >= 0
    rank_bytes_by_shape = {shape: row["rank_bytes"] for shape, row in zip(shapes, result["host"], strict=True)}
    assert (
        rank_bytes_by_shape[2, 20]
        == rank_bytes_by_shape[2, 404]
        < rank_bytes_by_shape[5, 404]
        == rank_bytes_by_shape[5, 20]
    ), "bytes grow with the rows, not with their contexts"


def test_text_output(
    tiny_model: MakeModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = tiny_model("llama")
    monkeypatch.setattr(model_source, "resolve", lambda source: directory)
    assert run(["engine", "--host", "--batch", "3", "--context", "9"]) == 0
    assert "batch    3, context      9" in capsys.readouterr().out
