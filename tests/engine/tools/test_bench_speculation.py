"""`cluster bench speculation --json` keeps its contract."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from cluster.cli.app import run
from engine.tools import bench_speculation
from tests.character_tokenizer import CHARACTERS, save_tokenizer
from tests.engine.draft_models.smaller_model import first_layers
from tests.engine.tiny_models import MakeModel


@pytest.mark.parametrize(("clock", "methods"), [("wall", ""), ("cpu", "suffix,draft,self,auto")])
def test_it_measures_every_method_beside_none(
    clock: str,
    methods: str,
    tiny_model: MakeModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("llama")[0], directory)
    save_tokenizer(directory)
    monkeypatch.setattr(
        bench_speculation, "prompt_texts", lambda: {"edit": CHARACTERS[3:9] * 3, "open": CHARACTERS[:5]}
    )
    options = [
        "--model",
        str(directory),
        "--batch",
        "1,2",
        "--kind",
        "edit",
        "--max-tokens",
        "6",
        "--tries",
        "2",
        "--threads",
        "1",
    ]
    options += ["--cpu-time"] if clock == "cpu" else []
    options += ["--method", methods, "--draft-model", str(first_layers(directory, 2))] if methods else []
    threads = torch.get_num_threads()
    try:
        assert run(["bench", "speculation", *options, "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out)
    rows = result["rows"]
    assert (result["clock"], result["threads"]) == (clock, 1)
    assert [(row["kind"], row["batch"], row["method"]) for row in rows] == [
        ("edit", batch, method) for batch in (1, 2) for method in ("off", *(methods or "ngram,suffix,auto").split(","))
    ]
    for row in rows:
        assert row["is_same"] and row["tokens"] == 6 * row["batch"] and row["tokens_per_s"] > 0
        assert row["accepted"] <= row["drafted"] and (row["method"] != "off" or row["drafted"] == 0)
        assert row["beside_off"] == 1.0 or row["method"] != "off"


def test_its_prompts_are_there() -> None:
    texts = bench_speculation.prompt_texts()
    assert list(texts) == ["code_change", "copy_edit", "json_rewrite", "open_chat"] and all(texts.values())


def test_it_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--kind", "poem"], "copy_edit"),
        (["--method", "luck"], "--method takes some of ngram"),
        (["--method", "draft"], "draft needs a smaller model of the same tokenizer"),
        (["--method", "auto", "--draft-model", "/nowhere"], "speculation.model: /nowhere: no such"),
    ):
        assert run(["bench", "speculation", *options]) == 2
        assert said in capsys.readouterr().err


def test_it_refuses_a_model_of_another_vocabulary(
    tiny_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("model", "other"):
        shutil.copytree(tiny_model("llama")[0], tmp_path / name)
        save_tokenizer(tmp_path / name)
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    models = ["--model", str(tmp_path / "model"), "--draft-model", str(tmp_path / "other")]
    assert run(["bench", "speculation", "--method", "draft", *models]) == 2
    assert "has another vocabulary than the served model" in capsys.readouterr().err
