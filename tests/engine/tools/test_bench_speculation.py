"""`cluster bench speculation --json` keeps its contract."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from cluster.cli.app import run
from cluster.model import source as model_source
from engine.tools import bench_speculation
from tests.character_tokenizer import CHARACTERS, save_tokenizer
from tests.engine.tiny_models import MakeModel


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_it_measures_every_method_beside_none(
    clock: str,
    tiny_model: MakeModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("llama")[0], directory)
    save_tokenizer(directory)
    monkeypatch.setattr(model_source, "resolve", lambda source: directory)
    monkeypatch.setattr(
        bench_speculation, "prompt_texts", lambda: {"edit": CHARACTERS[3:9] * 3, "open": CHARACTERS[:5]}
    )
    options = ["--batch", "1,2", "--kind", "edit", "--max-tokens", "6", "--tries", "2", "--threads", "1"]
    options += ["--cpu-time"] if clock == "cpu" else []
    threads = torch.get_num_threads()
    try:
        assert run(["bench", "speculation", *options, "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out)
    rows = result["rows"]
    assert (result["clock"], result["threads"]) == (clock, 1)
    assert [(row["kind"], row["batch"], row["method"]) for row in rows] == [
        ("edit", batch, method) for batch in (1, 2) for method in ("off", "ngram", "suffix", "auto")
    ]
    for row in rows:
        assert row["is_same"] and row["tokens"] == 6 * row["batch"] and row["tokens_per_s"] > 0
        assert row["accepted"] <= row["drafted"] and (row["method"] != "off" or row["drafted"] == 0)
        assert row["beside_off"] == 1.0 or row["method"] != "off"


def test_its_prompts_are_there() -> None:
    texts = bench_speculation.prompt_texts()
    assert list(texts) == ["code_change", "copy_edit", "json_rewrite", "open_chat"] and all(texts.values())


def test_it_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "speculation", "--kind", "poem"]) == 2
    assert "copy_edit" in capsys.readouterr().err
