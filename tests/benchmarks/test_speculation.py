"""Contract of `python -m benchmarks speculation --json`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.app import run
from benchmarks.speculation import bench as bench_speculation
from benchmarks.speculation.methods_in_turn import answer_in_turn
from tests.engine.spec_decode.draft_models.smaller_model import first_layers
from tests.engine.tiny_models import MakeModel
from tests.support.character_tokenizer import CHARACTERS, save_tokenizer


@pytest.mark.parametrize(("clock", "methods"), [("wall", ""), ("cpu", "suffix,draft,self,auto")])
def test_every_method_is_compared_with_off(
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
        assert run(["speculation", *options, "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out)
    rows = result["rows"]
    assert (result["clock"], result["threads"]) == (clock, 1)
    assert [(row["kind"], row["batch"], row["method"]) for row in rows] == [
        ("edit", batch, method) for batch in (1, 2) for method in ("off", *(methods or "ngram,suffix,auto").split(","))
    ]
    for row in rows:
        assert row["is_same"] and row["tokens_per_s"] > 0
        assert row["method"] != "off" or (row["tokens"], row["steps"]) == (15 * row["batch"], 15), "5 of 6, 3 times"
        assert row["accepted"] <= row["drafted"] and (row["method"] != "off" or row["drafted"] == 0)
        assert row["beside_off"] == 1.0 or row["method"] != "off"


def test_prompts_from_a_file(tiny_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("llama")[0], directory)
    save_tokenizer(directory)
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": "".join(CHARACTERS[i : i + 6]) * 2}) + "\n" for i in range(3)))
    options = ["--model", str(directory), "--prompts", str(source), "--batch", "2", "--max-tokens", "20"]
    options += ["--tries", "1", "--threads", "1", "--method", "draft", "--every-step", "--draft-tokens", "3"]
    options += ["--draft-model", str(first_layers(directory, 2))]
    threads = torch.get_num_threads()
    try:
        assert run(["speculation", *options, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert run(["speculation", *options, "--most-prompts", "1"]) == 2
        assert "--batch 2 needs as many prompts, but --prompts has 1; use --batch 1" in capsys.readouterr().err
        assert run(["speculation", *options, "--most-prompts", "1", "--batch", "1"]) == 0
        outputs = capsys.readouterr().out
    finally:
        torch.set_num_threads(threads)
    off, drafting = result["rows"]
    assert off["tokens"] == 38 and all(row["is_same"] for row in result["rows"]), "two at a time: of three, two"
    assert len(drafting["by_place"]) <= 3 and drafting["by_place"][0][0] > 10
    assert all(right <= drafted for drafted, right in drafting["by_place"])
    assert drafting["drafted"] == sum(n for n, _ in drafting["by_place"])
    assert "prompts" in outputs and "    19 tokens" in outputs and "; by place " in outputs


def test_results_are_printed_incrementally(
    tiny_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("llama")[0], directory)
    save_tokenizer(directory)
    outputs = []

    def look_and_measure(*arguments: Any) -> Any:
        outputs.append(capsys.readouterr().out)
        return answer_in_turn(*arguments)

    monkeypatch.setattr(bench_speculation, "answer_in_turn", look_and_measure)
    options = ["--model", str(directory), "--kind", "open_chat", "--batch", "1, 2", "--max-tokens", "3"]
    options += ["--tries", "1", "--answers", "1", "--threads", "1", "--method", "ngram"]
    threads = torch.get_num_threads()
    try:
        assert run(["speculation", *options]) == 0
    finally:
        torch.set_num_threads(threads)
    outputs.append(capsys.readouterr().out)
    assert outputs[0] == "model, 1 threads, wall time, temperature 0.0\n"
    assert [[line.split()[:4] for line in part.splitlines()] for part in outputs[1:]] == [
        [["open_chat", "batch", batch, method] for method in ("off", "ngram")] for batch in ("1", "2")
    ]


def test_earlier_answers_improve_drafts(
    tiny_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model("llama")[0], directory)
    save_tokenizer(directory)
    options = ["--model", str(directory), "--kind", "open_chat", "--batch", "1", "--max-tokens", "24", "--tries", "1"]
    options += ["--answers", "1", "--threads", "1", "--method", "suffix", "--every-step", "--json"]
    threads = torch.get_num_threads()
    steps = []
    try:
        for more in ([], ["--answered", "2"]):  # greedy: equal for all seeds
            assert run(["speculation", *options, *more]) == 0
            off, drafting = json.loads(capsys.readouterr().out)["rows"]
            assert off["steps"] == 23 and drafting["is_same"]
            steps.append(drafting["steps"])
    finally:
        torch.set_num_threads(threads)
    assert steps[1] < steps[0] / 2


def test_prompt_files_exist() -> None:
    texts = bench_speculation.prompt_texts()
    assert list(texts) == ["code_change", "copy_edit", "json_rewrite", "open_chat"] and all(texts.values())


def test_invalid_options_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for options, error in (
        (["--kind", "poem"], "open_chat (got 'poem')"),
        (["--batch", "1,x"], "--batch takes integers above 0, such as 1,4 (got 'x')"),
        (["--batch", "4,²"], "(got '²')"),
        (["--answers", "2", "--prompts", "x"], "--answers: not allowed with --prompts"),
        (["--method", "ngram,suffix", "--draft-model", "x"], "--draft-model: ngram and suffix do not use it"),
        (["--kind", "copy_edit", "--prompts", "x"], "--prompts and --kind"),
        (["--prompts", "/nowhere"], "--prompts /nowhere: not valid JSON lines"),
        (["--prompts", __file__], "not valid JSON lines"),
        (["--method", "luck"], "--method takes some of ngram"),
        (["--method", "draft"], "draft needs a smaller model of the same tokenizer"),
        (["--method", "auto", "--draft-model", "/nowhere"], "speculation.model: /nowhere: no such"),
    ):
        assert run(["speculation", *options]) == 2
        assert error in capsys.readouterr().err


def test_draft_model_with_another_vocabulary_is_rejected(
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
    assert run(["speculation", "--method", "draft", *models]) == 2
    assert "has another vocabulary than the served model" in capsys.readouterr().err
