"""Reading of the JSON objects of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.types.errors import SpecError


def one_line(error: Exception) -> str:
    """Return an error's message in one line; values of a file may have line breaks."""
    return " ".join(str(error).split())


def read_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Read a JSON object; missing_ok: an empty one if there is no file. Raises SpecError."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise SpecError(f"{path}: no such file; a model directory has config.json beside its weights") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(tree, dict):
        raise SpecError(f"{path}: not a JSON object")
    return tree


def _number(tree: dict[str, Any]) -> Any:
    """Return the number that transformers 5 writes as an object, {"__float__": "Infinity"}; else the object."""
    word = tree.get("__float__")
    return float(word) if isinstance(word, str) and len(tree) == 1 else tree
