"""`cluster train-draft`, as an operator runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cluster.cli.app import run
from tests.engine.tiny_models import random_model, tiny_config
from tests.support.character_tokenizer import save_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    random_model(tiny_config("llama", max_position_embeddings=64)).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def _train(model_dir: Path, data: Path | str, output: Path, *more: str) -> int:
    given = ["--model", str(model_dir), "--data", str(data), "-o", str(output), "--passes", "1", "--threads", "1"]
    return run(["train-draft", "--kind", "eagle3", *given, *more])


def _file(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_file_to_heads(
    has_bf16: bool,
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    lines = [json.dumps({"prompt": f"Say {number}"}) for number in range(20)]
    data, output = _file(tmp_path / "data.jsonl", *lines), tmp_path / "heads"
    assert _train(model_dir, data, output) == 0
    said = capsys.readouterr()
    assert f"wrote {output}: 0.1 MB, " in said.out
    assert "untrained: 1." in said.err and "pass 1: 1." in said.err
    assert said.err.startswith("answers 0 of "), "before the first tenth is done"
    assert {path.name for path in output.iterdir()} == {"config.json", "model.safetensors", "training"}
    assert _train(model_dir, data, output) == 0, "it is done"
    assert _train(model_dir, data, output, "--seed", "1") == 2
    assert "holds another run (seed 0, not 1); give another directory" in capsys.readouterr().err
    assert _train(model_dir, _file(tmp_path / "other.jsonl", '{"prompt": "a"}'), output) == 2
    assert "holds another run (another --data); give another directory" in capsys.readouterr().err


def test_mistakes_are_one_line(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _file(tmp_path / "data.jsonl", '{"prompt": "a"}', '{"messages": 1}')
    assert _train(model_dir, data, tmp_path / "heads") == 2
    assert _train(model_dir, "self", tmp_path / "heads") == 2
    assert _train(model_dir, tmp_path / "none", tmp_path / "heads") == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith(f"cluster: {data}:2: neither messages, nor a prompt, nor a text;")
    assert second == "cluster: --data self: the model has no chat template that opens a user's turn; give a file"
    assert third == f"cluster: --data {tmp_path / 'none'}: No such file or directory"
    assert not (tmp_path / "heads").exists()


def test_ctrl_c_is_one_line_that_says_how_to_go_on(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    data, output = _file(tmp_path / "data.jsonl", '{"prompt": "a"}'), tmp_path / "heads"
    monkeypatch.setattr("engine.training.training.train", ctrl_c)
    assert _train(model_dir, data, output) == 130
    assert capsys.readouterr().err == f"cluster: interrupted; the same command goes on from what {output} holds\n"
    monkeypatch.setattr("core.model.source.resolve", ctrl_c)
    assert _train(model_dir, data, output) == 130
    assert capsys.readouterr().err == "cluster: interrupted\n"
