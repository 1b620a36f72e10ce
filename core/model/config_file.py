"""Settings of a model directory in config.json's form: that file, or params.json where there is only this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.model.json_file import one_line, read_object
from core.model.mistral_params import PARAMS, to_config
from core.types.errors import SpecError

CONFIG = "config.json"


def config_file(directory: Path) -> Path:
    """Return the file with a model's settings: config.json, unless params.json is there and config.json is not."""
    own = directory / PARAMS
    return own if own.is_file() and not (directory / CONFIG).exists() else directory / CONFIG


def has_own_format(directory: Path) -> bool:
    """Return whether a model is in Mistral's own format."""
    return config_file(directory).name == PARAMS


def read_config(directory: Path) -> dict[str, Any]:
    """Return a model's settings in config.json's form. Raises SpecError."""
    file = config_file(directory)
    raw = read_object(file)
    if file.name != PARAMS:
        return raw
    try:
        return to_config(raw)
    except SpecError as error:
        raise SpecError(f"{file}: {one_line(error)}") from None
