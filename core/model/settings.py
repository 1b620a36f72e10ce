"""JSON objects of a model directory, and the settings of a config.json, checked as they are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.types.errors import SpecError

MOST = (1 << 31) - 1
_NEUTRAL = (1, "none")


class Settings:
    """Settings of one config.json, with the family's defaults for absent keys.

    A null counts as absent, and hides the family's default. The object records which settings were read.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        found = {**(defaults or {}), **raw}
        self._raw = {name: value for name, value in found.items() if value is not None}
        self._nulls = found.keys() - self._raw.keys()
        self._seen = set[str]()

    def replaced(self, **values: Any) -> Settings:
        """Return a copy with these values, which shares the record of settings that were read."""
        other = Settings(values, self._raw)
        other._seen, other._nulls = self._seen, self._nulls - values.keys()
        return other

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting of any type."""
        self._seen.add(name)
        return self._raw.get(name, default)

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """Return a whole number. Raises SpecError for other values, KeyError if it is missing without a default."""
        found = self.get(name, default)
        if found is None:
            raise KeyError(name)
        if not (type(found) is int and least <= found <= most):
            raise SpecError(f"{name} is {found!r:.60}, and must be a whole number from {least} to {most}")
        return found

    def real(self, name: str, default: float | None = None) -> float:
        """Return a number above 0. Raises as `count` does."""
        found = self.get(name, default)
        if found is None:
            raise KeyError(name)
        if not (type(found) in (int, float) and 0 < found <= sys.float_info.max):
            raise SpecError(f"{name} is {found!r:.60}, and must be a number above 0")
        return float(found)

    def optional_real(self, name: str) -> float | None:
        return self.real(name) if name in self else None

    def limits(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Return the ends of a range of numbers from 0 to infinity. Raises SpecError for other values."""
        found = self.get(name, default)
        is_pair = isinstance(found, list | tuple) and [type(end) in (int, float) for end in found] == [True, True]
        if not (is_pair and 0 <= found[0] <= found[1]):
            raise SpecError(f"{name} is {found!r:.60}, and must be two numbers from 0, the lower one first")
        return float(found[0]), float(found[1])

    def switch(self, name: str, default: bool = False) -> bool:
        """Return true or false; null is false, as in transformers. Raises SpecError for other values."""
        found = self.get(name, default and name not in self._nulls)
        if found not in (True, False):
            raise SpecError(f"{name} is {found!r}, and must be true or false")
        return bool(found)

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """Return one of the choices. Raises SpecError for other values."""
        found = self.get(name, default)
        if found not in choices:
            raise SpecError(f"{name} {found!s:.60} is not supported; supported: {', '.join(choices)}")
        return str(found)

    def object(self, name: str) -> Mapping[str, Any]:
        """Return a JSON object, empty if it is absent. Raises SpecError for other values."""
        found = self.get(name, {})
        if not isinstance(found, dict):
            raise SpecError(f"{name} is {found!r:.60}, and must be a JSON object")
        return found

    def per_layer(self, name: str, num_layers: int, choices: Sequence[Any]) -> list[Any] | None:
        """Return one of the choices per layer; None if the list is absent. Raises SpecError for others.

        Values past the last layer are dropped.
        """
        found = self.get(name)
        if found is None:
            return None
        if not isinstance(found, list) or len(found) < num_layers:
            raise SpecError(f"{name} must be a list of {num_layers} values, one per layer")
        for index, value in enumerate(found[:num_layers]):
            if value not in choices:
                supported = ", ".join(map(str, choices))
                raise SpecError(f"{name} {value!s:.60} of layer {index} is not supported; supported: {supported}")
        return found[:num_layers]

    def indices(self, name: str) -> list[int] | None:
        """Return a list of layers; None if it is absent. Raises SpecError for other values.

        Layers past the last are possible, as in transformers.
        """
        found = self.get(name)
        if found is not None and not (isinstance(found, list) and all(type(i) is int and i >= 0 for i in found)):
            raise SpecError(f"{name} is {found!r:.60}, and must be a list of layers, counted from 0")
        return found

    def unread(self) -> dict[str, Any]:
        """Return the settings that nothing has read."""
        return {name: found for name, found in self._raw.items() if name not in self._seen}

    def unread_effects(self) -> dict[str, Any]:
        """Return the settings that nothing has read and that may have an effect: not 0, false, empty, 1 or "none"."""
        return {
            name: found for name, found in self.unread().items() if found and (found is True or found not in _NEUTRAL)
        }


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
