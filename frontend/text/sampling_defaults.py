"""Sampling defaults of a model: those of its generation_config.json, as vLLM applies them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.model.settings import read_object
from core.types.errors import SpecError
from frontend.text.completion_request import NEUTRAL, RANGES

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
# Fields of the file, and the request's names for them.
_APPLIED = {name: name for name in NEUTRAL} | {"max_new_tokens": "max_tokens"}
# Fields that change what transformers samples, with values that have no effect.
_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("typical_p", "length_penalty", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("penalty_alpha", "top_h"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})),
    "stop_strings": ([],),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    "num_beams": (1,),
}


def generation_config_dir(model_dir: Path, choice: str) -> Path:
    """Return the directory whose generation_config.json names the end tokens. choice: as in the spec."""
    return model_dir if choice in ("auto", "vllm") else Path(choice)


def sampling_defaults(model_dir: Path, choice: str) -> Mapping[str, float]:
    """Return the values for fields that a request omits, by the request's names; max_tokens only if the file has one.

    choice: `auto`, `vllm` or a directory, as in the spec. The file's `do_sample: false` means greedy. Raises SpecError.
    """
    if choice == "vllm":
        return NEUTRAL
    path = generation_config_dir(model_dir, choice) / FILE
    given = read_object(path, missing_ok=choice == "auto")
    found = {ours: _checked(path, name, value, ours) for name, ours in _APPLIED.items()
             if (value := given.get(name)) is not None}  # fmt: skip
    if (samples := given.get("do_sample")) not in (None, True, False):
        raise SpecError(
            f"{path}: do_sample is {samples!r}, expected true or false; correct it, "
            "or set model.generation_config: vllm"
        )
    if samples is not None and not samples:
        found["temperature"] = 0.0
    if found:
        logger.info("%s: sampling defaults %s; model.generation_config: vllm turns them off", path, found)
    if left := [name for name, neutral in _NOT_APPLIED.items() if given.get(name) not in (None, *neutral)]:
        logger.warning("%s: not applied: %s", path, ", ".join(left))
    return {**NEUTRAL, **found}


def _checked(path: Path, name: str, value: Any, ours: str) -> float:
    lowest, highest, is_lowest_allowed = RANGES[ours]
    is_number = type(value) in (int, float) and (ours not in ("top_k", "max_tokens") or value % 1 == 0)
    if not is_number or not lowest <= value <= highest or (value == lowest and not is_lowest_allowed):
        raise SpecError(
            f"{path}: {name} is {value!r}, expected a number {'from' if is_lowest_allowed else 'above'} {lowest} to "
            f"{highest}; correct it, or set model.generation_config: vllm"
        )
    return int(value) if ours in ("top_k", "max_tokens") else value
