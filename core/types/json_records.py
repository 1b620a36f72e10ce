"""Dataclasses stored or sent as JSON, read across versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol


class Record(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def known_fields(kind: type[Record], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `tree` that are fields of `kind`; fields of newer versions are dropped."""
    return {name: value for name, value in tree.items() if name in kind.__dataclass_fields__}
