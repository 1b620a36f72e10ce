"""Sampling defaults of generation_config.json: read as vLLM does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from core.spec.schema import ModelSpec
from core.types.errors import SpecError
from frontend.text.completion_request import NEUTRAL
from frontend.text.sampling_defaults import sampling_defaults
from frontend.text.tokenizer import Tokenizer

GENERATION = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05,
              "presence_penalty": 0.5, "frequency_penalty": -0.25}  # fmt: skip


def write(directory: Path, **generation: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (GENERATION, GENERATION),
        ({"top_k": 1, "temperature": None, "eos_token_id": 2}, {"top_k": 1}),
        ({"max_new_tokens": 99}, {"max_tokens": 99}),
        ({"top_k": 50.0, "temperature": 0}, {"top_k": 50, "temperature": 0}),
        ({"do_sample": False}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0, "top_p": 0.8}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({}, {}),
    ],
    ids=str,
)
def test_defaults_of_the_file(generation: dict[str, Any], expected: dict[str, float], tmp_path: Path) -> None:
    assert sampling_defaults(write(tmp_path, **generation), "auto") == {**NEUTRAL, **expected}


def test_choice_of_the_spec(tmp_path: Path) -> None:
    (own := tmp_path / "own").mkdir()
    (other := tmp_path / "other").mkdir()
    assert sampling_defaults(own, "auto") == NEUTRAL, "a model without the file"
    write(own, top_k=1)
    write(other, top_k=2)
    assert sampling_defaults(own, "vllm") == NEUTRAL
    assert sampling_defaults(own, ModelSpec(generation_config=str(other)).generation_config)["top_k"] == 2
    with pytest.raises(SpecError, match=r"nowhere/generation_config\.json: no such file"):
        sampling_defaults(own, str(tmp_path / "nowhere"))
    assert Path(ModelSpec(generation_config="there").generation_config).is_absolute()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": -1}, {"top_p": -1}, {"top_k": 1.5}, {"top_k": math.inf}, {"min_p": "x"}, {"top_p": True}),
        {"do_sample": "false"},
    ],
    ids=str,
)
def test_invalid_defaults_name_the_fix(wrong: dict[str, Any], tmp_path: Path) -> None:
    ((name, value),) = wrong.items()
    complaint = rf"generation_config.json: {name} is {value!r}, .* or set model.generation_config: vllm"
    with pytest.raises(SpecError, match=complaint):
        sampling_defaults(write(tmp_path, **wrong), "auto")


def test_fields_without_effect_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampling_defaults(
        write(tmp_path, no_repeat_ngram_size=3, num_beams=1, suppress_tokens=[7], stop_strings=["x"]), "auto"
    )
    assert "not applied: no_repeat_ngram_size, suppress_tokens, stop_strings" in caplog.text


def test_end_tokens_are_those_of_the_chosen_directory(byte_level_dir: Path, tmp_path: Path) -> None:
    own = Tokenizer(byte_level_dir).eos_token_ids
    write(tmp_path, eos_token_id=[5])
    assert Tokenizer(byte_level_dir, generation_dir=tmp_path).eos_token_ids - own == {5}
