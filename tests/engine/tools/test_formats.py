"""Report of formats: perplexity, speed and memory of each combination."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner

from cluster.cli.app import app
from core.process.child_process import ChildProcess
from core.types.errors import SpecError
from engine.quantization.write import quantize_checkpoint
from engine.tools import formats
from engine.tools.formats import Combination, FormatCost, make_directory, measure, write_report
from engine.tools.stepper import Stepper
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel, reference_logits
from tests.support.grids import quick

WINDOWS = {"window": 20, "stride": 8, "max_windows": 4, "seconds": 0.01, "threads": 1}


def write_tokenizer(directory: Path) -> None:
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB_SIZE)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(directory / "tokenizer.json"))


class _InThisProcess:
    """A stepper in the process of the test: imports in another one take seconds."""

    def __init__(self, module: str, options: str, *, answer_s: float) -> None:
        self._stepper = Stepper(**json.loads(options))

    def ask(self, order: str, **arguments: Any) -> Any:
        return getattr(self._stepper, order)(**arguments)

    def close(self) -> None: ...


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("first_maker", quick([_InThisProcess, ChildProcess], [_InThisProcess]))
def test_combinations_are_compared_with_the_first(
    first_maker: Any, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 20 tokens with 8 scored; an 8-bit pool, wire or weights change the perplexity a little."""
    makers = iter([first_maker, *5 * [_InThisProcess]])  # the command starts a process for each
    monkeypatch.setattr(formats, "ChildProcess", lambda *arguments, **options: next(makers)(*arguments, **options))
    directory, model = tiny_model("llama")
    write_tokenizer(directory)
    (ids,) = prompts(60)
    text = " ".join(map(str, ids))
    quantize_checkpoint(directory, tmp_path / "fp8", "fp8")
    base = Combination(weights="bf16", kv="bf16", wire="raw", model_dir=directory, held="widen")
    others = [
        Combination(weights="bf16", kv="int8", wire="raw", model_dir=directory, pool_dtype="int8"),
        Combination(
            weights="bf16", kv="int8:0", wire="raw", model_dir=directory, pool_dtype="int8", unquantized_layers=(0,)
        ),
        Combination(weights="bf16", kv="bf16", wire="fp8", model_dir=directory, wire_dtype="fp8_e4m3"),
        Combination(weights="fp8", kv="bf16", wire="raw", model_dir=tmp_path / "fp8"),
    ]
    first, *rest = measure([base, *others], text, dtype="float32", **WINDOWS)
    losses = []
    for start in (0, 8, 16, 24):
        logits = reference_logits(model, ids[start : start + 19])[11:]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start + 12 : start + 20])))
    assert first.perplexity == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-4)
    assert (first.difference, first.error) == (0, 0)
    assert all(0 < abs(cost.difference) < 0.05 for cost in rest)
    assert rest[0].kv_bytes_per_token < rest[1].kv_bytes_per_token < first.kv_bytes_per_token
    assert first.kv_bytes_per_token == rest[2].kv_bytes_per_token
    with pytest.raises(SpecError, match="has 60 tokens, fewer than one window of 100"):
        measure([base], text, dtype="float32", **WINDOWS | {"window": 100, "stride": 50})


def test_report_marks_what_nothing_beats(tmp_path: Path) -> None:
    def cost(weights: str, speed: float, perplexity: float, *, is_best: bool) -> FormatCost:
        figures = {"weight_bytes": 1 << 20, "kv_bytes_per_token": 8, "first_token_s": 0.1, "batch_tokens_s": 9.0}
        quality = {"perplexity": perplexity, "difference": 0.01, "error": None}
        return FormatCost(
            weights=weights, kv="int8", wire="raw", decode_tokens_s=speed, is_best=is_best, **figures, **quality
        )

    costs = [cost("a", 10, 12.0, is_best=True), cost("b", 20, 13.0, is_best=True), cost("c", 9, 12.5, is_best=False)]
    make_directory(tmp_path / "report")
    note = write_report(costs, tmp_path / "report", {"model": "m"})
    tree = json.loads((tmp_path / "report" / "formats.json").read_text())
    assert [row["weights"] for row in tree["results"]] == ["a", "b", "c"] and tree["model"] == "m"
    assert (
        "| a | int8 | raw | 1 | 8 | 10.0 | 9.0 | 100 | 12.000 | +1.00% | * |"
        in (tmp_path / "report" / "formats.md").read_text()
    )
    if find_spec("matplotlib"):
        assert (tmp_path / "report" / "formats.png").read_bytes().startswith(b"\x89PNG") and not note
    else:
        assert "pip install 'xpyd[plot]'" in note
    (tmp_path / "full" / "formats.json").mkdir(parents=True)
    with pytest.raises(SpecError, match="full: cannot be written"):
        write_report(costs, tmp_path / "full", {})


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--kv", "x", "--kv: unknown format 'x'"),
        ("--kv", "int4:x", "a layer of 'int4:x' is not a number"),
        ("--kv", "bf16,int4:0:-4", "--kv: layer -4 is out of range [-3, 3)"),
        ("--wire", "raw,", "--wire: unknown format ''"),
        ("--weights", "x", "--weights: unknown format 'x'; choose from bf16, stored"),
        ("--weights", "int4:x", "the group of 'int4:x' is not a number"),
        ("--weights", "bf16=", "'bf16=' is not NAME=SOURCE"),
        ("-o", "/dev/null/x", "/dev/null/x: cannot be written"),
    ],
)
def test_faults_are_named_before_the_measurement(
    option: str, value: str, named: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory, _ = tiny_model("llama")
    write_tokenizer(directory)
    command = ["eval", "formats", "--model", str(directory), "-o", str(tmp_path), option, value]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0 and named in str(result.exception)
